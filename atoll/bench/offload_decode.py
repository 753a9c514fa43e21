"""`bench offload`, part 3: decode steps of a model with transfers running beside them without a pause, against the same steps alone. Knows no scheduler.

Predicted for an H200 and Qwen3.5-35B-A3B's shape in bf16, before it was measured: a step reads device memory at TB/s, and both ways together add 0.1 of one, so
the device slows down by 2 to 4 %. To issue scattered pages takes the host 0.5 us each, 8 % of the time that they take: so much of a step for each way.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

import torch

from atoll.bench.model import fill_pools, give_back, make_step
from atoll.engine.build import make_slot_layout
from atoll.engine.runner import Runner, RunnerConfig
from atoll.errors import ConfigError
from atoll.kv.layout import PageLayout
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool
from atoll.offload.base import BlobKind, Metadata, Span, Transfer
from atoll.offload.base_worker import Fence, Regions, record_fence
from atoll.offload.copier import Way
from atoll.offload.host_pages import HostPages
from atoll.offload.worker import TierWorker
from atoll.ops.attention import DecodeSpec
from atoll.ops.quant.formats import KVFormat

if TYPE_CHECKING:
    from atoll.models.loader import LoadedModel

Beside = Literal["none", "load", "store", "both"]
WAYS: dict[Beside, Sequence[Way]] = {"none": (), "load": (Way.LOAD,), "store": (Way.STORE,), "both": tuple(Way)}

AHEAD = 2  # steps' worth of transfers in flight at most
CLOSE_S = 60.0


@dataclass(frozen=True)
class DecodeBesideOptions:
    """One model at one batch on one device."""

    model: str = "demo"  # a name for the rows
    batch: int = 16  # sequences of a decode step
    context: int = 1024  # tokens of each
    kv_format: str = "bf16"
    page_size: int = 16  # tokens
    transfer_bytes: int = 64 << 20  # of one transfer
    rounds: int = 5
    steps: int = 10  # of one sample
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0


@dataclass
class DecodeBesideRow:
    """Decode steps with transfers one way, both ways, or none beside them. Times are medians over all steps."""

    model: str
    batch: int
    context: int  # tokens of each sequence
    kv_format: str
    page_size: int  # tokens
    beside: Beside
    graph: bool  # whether the steps replayed a CUDA graph
    num_steps: int
    step_us: float  # a whole step, with what the engine does for transfers
    spread: float  # (longest - shortest) / step_us
    ratio: float | None  # by the step alone
    issue_us: float  # of the step, on the host: the worker's `run`
    covered: float | None  # share of the steps at whose end every way was still in flight
    moved_gbps: float  # all ways together


def time_decode_beside(
    loaded: "LoadedModel", options: DecodeBesideOptions, on_row: Callable[[DecodeBesideRow], None] = lambda row: None
) -> list[DecodeBesideRow]:
    """Time decode steps alone, beside loads, beside stores, and beside both. Raises ConfigError for a context that the model does not have."""
    if not 2 <= options.context <= loaded.config.max_position:
        raise ConfigError(
            f"context {options.context} is outside 2 to {loaded.config.max_position}, the positions of {options.model}; give tokens in that range"
        )
    counts = (options.batch, options.rounds, options.steps, options.transfer_bytes)
    if min(counts) < 1:
        raise ConfigError(f"batch, rounds, steps and transfer_bytes are {counts}, one of which is below 1; give 1 or more")
    give_back(options.device)
    bench = _Bench(loaded, options)
    try:
        samples = bench.sample_all()
    finally:
        bench.close()
    rows: list[DecodeBesideRow] = []
    for beside, found in samples.items():
        walls = [sample.step_us for sample in found]
        step_us = statistics.median(walls)
        row = DecodeBesideRow(
            options.model,
            options.batch,
            options.context,
            options.kv_format,
            options.page_size,
            beside,
            graph=bench.replays_graph,
            num_steps=len(found),
            step_us=step_us,
            spread=(max(walls) - min(walls)) / step_us,
            ratio=step_us / rows[0].step_us if rows else None,
            issue_us=statistics.median(sample.issue_us for sample in found),
            covered=sum(sample.is_covered for sample in found) / len(found) if WAYS[beside] else None,
            moved_gbps=sum(sample.num_bytes for sample in found) / sum(walls) / 1e3,
        )
        rows.append(row)
        on_row(row)
    return rows


def decode_line(row: DecodeBesideRow) -> str:
    head = f"{row.model} {row.kv_format} batch {row.batch} context {row.context}, beside {row.beside:<5}: {row.step_us:9.0f} us a step"
    if row.ratio is None or row.covered is None:
        return head
    return f"{head}, {row.ratio:.3f} times; {row.issue_us:.0f} us to issue, {row.moved_gbps:.2f} GB/s moved, {row.covered:.0%} of the steps covered"


@dataclass(frozen=True)
class _Sample:
    step_us: float
    issue_us: float
    num_bytes: int  # of transfers that ended before the step
    is_covered: bool


class _TimedWorker(TierWorker):
    """Adds up how long `run` takes."""

    run_s = 0.0

    def run(self, metadata: Metadata, fence: Fence) -> None:
        begin = time.perf_counter()
        super().run(metadata, fence)
        self.run_s += time.perf_counter() - begin


class _Bench:
    """A runner at full pools, and a worker with pages of its own behind the sequences'."""

    def __init__(self, loaded: "LoadedModel", options: DecodeBesideOptions) -> None:
        config, model = loaded.config, loaded.model
        self._options = options
        layout = PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, options.page_size, cast(KVFormat, options.kv_format))
        slot_layout = make_slot_layout(config, model.dtype)
        num_held = options.batch * layout.num_pages_for(options.context)
        num_moved = max(1, options.transfer_bytes // layout.page_bytes)
        pool = PagePool(layout, 1 + num_held + 2 * num_moved, options.device)
        slots = SlotPool(slot_layout, options.batch, options.device) if slot_layout is not None else None
        fill_pools(pool, slots, options.seed)
        spec = DecodeSpec(
            config.num_q_heads, config.num_kv_heads, config.head_dim, options.page_size, q_dtype=model.dtype, kv_format=layout.kv_format, window=config.window
        )
        self._step = make_step(config, layout, options.batch, options.context, seed=options.seed)
        host = HostPages.anonymous(2 * num_moved, layout.page_bytes)
        # Memory that was never written is not there yet.
        host.pages.fill_(1)
        self._worker = _TimedWorker(host)
        self._worker.register(Regions(pool.buffer, image_pages=0))
        self._runner = Runner(model, spec, pool, RunnerConfig(options.context, options.batch), slots, self._worker)
        # Scattered on both sides. A way moves the same bytes between the same places again and again.
        rand = random.Random(options.seed)
        self._moved: dict[Way, tuple[tuple[Span, ...], tuple[int, ...]]] = {}  # spans in the pool, and host slots
        for i, way in enumerate(Way):
            pages = rand.sample(range(1 + num_held + i * num_moved, 1 + num_held + (i + 1) * num_moved), num_moved)
            spans = tuple(Span(BlobKind.KV, b"", (page,)) for page in pages)
            self._moved[way] = spans, tuple(rand.sample(range(i * num_moved, (i + 1) * num_moved), num_moved))
        self._transfer_bytes = num_moved * layout.page_bytes
        self._paces: dict[Way, int] = {}  # transfers that move while a step runs
        self._in_flight: dict[int, Way] = {}  # by generation
        self._generations, self._fences = itertools.count(1), itertools.count(1)

    @property
    def replays_graph(self) -> bool:
        return self._runner.captured_graph(self._options.batch) is not None

    def close(self) -> None:
        self._worker.close(CLOSE_S)

    def sample_all(self) -> dict[Beside, list[_Sample]]:
        # The first step compiles, and captures the graph; the second replays it for the first time.
        for _ in range(2):
            result = self._runner.execute(self._step)
            assert all(token.token_id is not None for token in result.tokens.values()), "random rows gave logits that are not finite"
        alone_us = statistics.median(sample.step_us for sample in self._sample(()))
        # What a way can move while a step runs: each step starts that many.
        self._paces = {way: max(1, round(alone_us / self._transfer_us(way))) for way in Way}
        samples: dict[Beside, list[_Sample]] = {beside: [] for beside in WAYS}
        turns = list(WAYS)
        for i_round in range(self._options.rounds):
            shift = i_round % len(turns)
            for beside in turns[shift:] + turns[:shift]:
                samples[beside] += self._sample(WAYS[beside])
        return samples

    def _sample(self, ways: Sequence[Way]) -> list[_Sample]:
        """Steps as the engine runs them: take completions, then the runner starts transfers behind the step's fence, and computes."""
        times: list[tuple[float, float]] = []
        ended: list[int] = []
        covers: list[bool] = []
        # The first bring the transfers up to their number, and are not counted.
        num_first = AHEAD + 1 if ways else 1
        for _ in range(num_first + self._options.steps):
            begin, run_s = time.perf_counter(), self._worker.run_s
            ended.append(self._poll())
            under_way = list(self._in_flight.values())
            covers.append(all(way in under_way for way in ways))
            counts = {way: min(self._paces[way], AHEAD * self._paces[way] - under_way.count(way)) for way in ways}
            step = replace(self._step, metadata=self._metadata(counts))
            self._runner.execute(step)
            times.append(((time.perf_counter() - begin) * 1e6, (self._worker.run_s - run_s) * 1e6))
        ended.append(self._poll())
        covers.append(all(way in self._in_flight.values() for way in ways))
        self._drain()
        # What had ended when the next step began is what moved beside this one.
        return [
            _Sample(step_us, issue_us, count * self._transfer_bytes, covered)
            for (step_us, issue_us), count, covered in zip(times[num_first:], ended[num_first + 1 :], covers[num_first + 1 :], strict=True)
        ]

    def _metadata(self, counts: dict[Way, int]) -> Metadata:
        """So many new transfers."""
        made: dict[Way, list[Transfer]] = {way: [] for way in Way}
        for way, count in counts.items():
            spans, slots = self._moved[way]
            for _ in range(count):
                generation = next(self._generations)
                self._in_flight[generation] = way
                made[way].append(Transfer(generation, spans, slots))
        return Metadata(next(self._fences), loads=tuple(made[Way.LOAD]), stores=tuple(made[Way.STORE]))

    def _poll(self) -> int:
        """How many transfers have ended."""
        told = self._worker.poll()
        for completion in told:
            assert completion.ok, f"a transfer failed: {completion.error}"
            del self._in_flight[completion.generation]
        return len(told)

    def _drain(self) -> None:
        while self._in_flight:
            self._worker.wait(CLOSE_S)
            assert self._poll(), f"{len(self._in_flight)} transfers have not ended within {CLOSE_S} s"

    def _transfer_us(self, way: Way) -> float:
        """Of one transfer with nothing beside it."""
        samples_us = []
        for _ in range(3):
            begin = time.perf_counter()
            metadata = self._metadata({way: 1})
            self._worker.run(metadata, record_fence(metadata.fence, self._options.device))
            self._drain()
            samples_us.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(samples_us)
