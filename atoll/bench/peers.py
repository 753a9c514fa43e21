"""Others' kernels in a decode bench: a workload as the probe's problem, so that the probe's adapters can be timed, and their builds in parallel."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace

import torch

from atoll.bench.shapes import DecodeShape
from atoll.bench.timing import Call, check_capture
from atoll.bench.workload import BenchPool, Workload
from atoll.errors import BackendError
from atoll.probe.adapters import get_adapter
from atoll.probe.cases import Case, DecodeProblem
from atoll.probe.parallel import process_pool

log = logging.getLogger(__name__)

Adapter = Callable[[DecodeProblem], Callable[[], tuple[torch.Tensor, torch.Tensor | None]]]
PeerKey = tuple[str, DecodeShape]

# A cold run prepares a peer once per table. One that holds more than this for all of them is timed warm alone.
MAX_PREPARED_BYTES = 4 << 30
# Each build may be several compilers of a GB or two.
MAX_BUILDS = 8
MAX_TOLD = 2000  # characters of what a build failed with


class DeviceLostError(BackendError):
    """A peer's kernel broke the device: nothing more runs in this process."""


def decode_problem(work: Workload, i_copy: int = 0) -> DecodeProblem:
    """One copy of the workload. No region of it is named: it is for timing, never for poisoning."""
    size = work.shape.page_size
    table = work.tables[i_copy].tolist()
    pages = tuple(tuple(row[: -(-n // size)]) for row, n in zip(table, work.lengths, strict=True))
    return DecodeProblem(
        case=Case(work.shape.spec(), tuple(work.lengths), max_seq_len=work.shape.ctx),
        q=work.q,
        kv=work.kv,
        seq_lens=torch.tensor(work.lengths, dtype=torch.int32),
        page_table=work.tables[i_copy],
        sinks=None,
        pages=pages,
        buffer=torch.empty(0, dtype=torch.uint8, device=work.q.device),
        gaps=None,
        regions={},
    )


def peer_calls(adapter: Adapter, work: Workload) -> tuple[list[Call], torch.Tensor]:
    """A call per copy of the workload, seen to run and to fit into a graph, and the output of the first.

    Raises BackendError for whatever the peer refuses or fails at, DeviceLostError where the device is of no use after it.
    """
    device = work.q.device
    try:
        first = adapter(decode_problem(work))
        out = first()[0].view_as(work.q)
        _synchronize(device)
        check_capture(first, device)
        calls: list[Call] = [first, *_further_calls(adapter, work)]
        _synchronize(device)
    except BackendError:
        raise
    except Exception as error:  # a peer may raise anything
        reason = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"
        try:
            _synchronize(device)
        except RuntimeError as lost:
            raise DeviceLostError(reason) from lost
        raise BackendError(reason) from error
    return calls, out


def _further_calls(adapter: Adapter, work: Workload) -> list[Call]:
    calls: list[Call] = []
    copies = work.tables.shape[0]
    for i_copy in range(1, copies):
        before = _allocated_bytes(work.q.device)
        calls.append(adapter(decode_problem(work, i_copy)))
        held = _allocated_bytes(work.q.device) - before
        if held * copies > MAX_PREPARED_BYTES:
            raise BackendError(f"prepared for one of {copies} tables it holds {held / 1e6:.0f} MB, so that it is timed with a warm L2 alone")
    return calls


def peer_key(name: str, shape: DecodeShape) -> PeerKey:
    """Equal for shapes that share what a peer compiles: batch and context are arguments."""
    return name, replace(shape, batch=1, ctx=1024)


def compile_peers(names: Iterable[str], shapes: Sequence[DecodeShape], device: torch.device, *, jobs: int | None = None) -> dict[PeerKey, str]:
    """Run every adapter once on a small case of each kind, in parallel processes, which fills its cache on disk; returns those that refuse or fail, and why."""
    keys = list(dict.fromkeys(peer_key(name, shape) for name in names for shape in shapes))
    jobs = min(jobs or MAX_BUILDS, MAX_BUILDS, os.cpu_count() or 1, len(keys))
    reasons = [_build(key, device) for key in keys] if jobs <= 1 else _build_in_parallel(keys, device, jobs)
    return {key: reason for key, reason in zip(keys, reasons, strict=True) if reason is not None}


def _build_in_parallel(keys: Sequence[PeerKey], device: torch.device, jobs: int) -> list[str | None]:
    reasons: list[str | None] = []
    with process_pool(jobs) as pool:
        for future in [pool.submit(_build, key, device) for key in keys]:
            try:
                reasons.append(future.result())
            except BrokenExecutor as error:
                reasons.append(f"a process that built peers ended: {error}")
    return reasons


def _build(key: PeerKey, device: torch.device) -> str | None:
    name, shape = key
    try:
        peer_calls(get_adapter(name), BenchPool([shape], device).workload(shape))
    except RuntimeError as error:  # of a peer, or of a device that the last peer in this process broke
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if error.__cause__ is not None:
            # No refusal: a compiler's message has many lines, of which the row keeps the first.
            log.warning("%s for %s: %s", name, shape.name, str(error.__cause__)[-MAX_TOLD:])
        return reason
    return None


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
