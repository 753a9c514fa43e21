"""The GPU's copier: a stream for each way, behind the fence, in few driver calls for all runs of a copy; needs no thread, knows no blob and no transfer.

Everything is issued by the thread that issues compute work: another thread's calls would break a graph capture.
"""

import time
from typing import Literal

import numpy as np
import torch

from atoll.errors import ConfigError
from atoll.offload.base_worker import Fence
from atoll.offload.copier import Copy, Way
from atoll.offload.driver import Driver
from atoll.offload.runs import Runs

# How runs are issued. batch: many in one driver call; each: a driver call for each; torch: a tensor copy for each.
# auto takes the first of these that can be had; `atoll bench offload` times all.
Issue = Literal["auto", "batch", "each", "torch"]
ISSUES: tuple[Issue, ...] = ("batch", "each", "torch")

# Runs of one driver call: the first are on their way while the next are issued. In one call 3,276 scattered pages of 320 KiB took 4.0 ms to issue, and 23.6
# in all, 82 % of one large copy's rate (H200, LOG.md, 2026-11-30).
MAX_BATCH = 256

# Between two looks at an event; a wait for one by itself has no time limit.
LOOK_S = 50e-6


class StreamCopy:
    """A copy between two events of its stream."""

    def __init__(self) -> None:
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.error: str | None = None

    def has_ended(self) -> bool:
        return self.end.query()

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


class StreamCopier:
    """Host pages that are not pinned are copied as rightly, but such a copy may hold its caller up."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor, driver: Driver | None, issue: Issue = "auto", *, is_pinned: bool) -> None:
        self._pool, self._host = pool, host  # [P, page_bytes], [N, page_bytes] uint8
        self._driver = driver
        self.issue: Issue = choose_issue(driver, issue, is_pinned=is_pinned)
        self._streams = {way: torch.cuda.Stream(pool.device) for way in Way}
        self._last: dict[Way, StreamCopy] = {}

    def start(self, way: Way, runs: Runs, fence: Fence) -> StreamCopy:
        assert fence.event is not None, "a fence on a GPU has an event"
        stream, copy = self._streams[way], StreamCopy()
        stream.wait_event(fence.event)
        with torch.cuda.stream(stream):
            copy.begin.record(stream)
            copy.error = self._issue_runs(way, runs, stream)
            # After a failure too: what was issued before it must end before the pages are anybody else's.
            copy.end.record(stream)
        self._last[way] = copy
        return copy

    def order_behind(self, copy: Copy) -> None:
        assert isinstance(copy, StreamCopy)
        torch.cuda.current_stream(self._pool.device).wait_event(copy.end)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not all(copy.has_ended() for copy in self._last.values()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def _issue_runs(self, way: Way, runs: Runs, stream: torch.cuda.Stream) -> str | None:
        if self.issue == "torch":
            for page, slot, length in zip(runs.pages.tolist(), runs.slots.tolist(), runs.lengths.tolist(), strict=True):
                in_pool, in_host = self._pool[page : page + length], self._host[slot : slot + length]
                target, source = (in_pool, in_host) if way is Way.LOAD else (in_host, in_pool)
                target.copy_(source, non_blocking=True)
            return None
        assert self._driver is not None
        page_bytes = self._pool.shape[1]
        in_pool_at, in_host_at = addresses(self._pool, runs.pages), addresses(self._host, runs.slots)
        targets, sources = (in_pool_at, in_host_at) if way is Way.LOAD else (in_host_at, in_pool_at)
        sizes = (runs.lengths * page_bytes).astype(np.uint64)
        copy = self._driver.copy_batch if self.issue == "batch" else self._driver.copy_each
        for first in range(0, len(sizes), MAX_BATCH):
            part = slice(first, first + MAX_BATCH)
            error = copy(targets[part], sources[part], sizes[part], stream.cuda_stream)
            if error is not None:
                return error
        return None


def addresses(rows: torch.Tensor, indices: np.ndarray) -> np.ndarray:
    """Of rows of a contiguous tensor [N, bytes] uint8: [len(indices)] uint64."""
    assert rows.is_contiguous() and rows.element_size() == 1
    return np.uint64(rows.data_ptr()) + indices.astype(np.uint64) * np.uint64(rows.shape[1])


def choose_issue(driver: Driver | None, issue: Issue, *, is_pinned: bool) -> Issue:
    """Raises ConfigError where the one that was asked for cannot be had."""
    # A batch is for memory that the device reads by itself.
    has_batches = driver is not None and driver.has_batches and is_pinned
    if issue == "auto":
        return "batch" if has_batches else "each" if driver is not None else "torch"
    if (issue == "batch" and not has_batches) or (issue == "each" and driver is None):
        why = "no CUDA driver is here" if driver is None else "host pages are not pinned" if not is_pinned else "this driver is older than CUDA 12.8"
        raise ConfigError(f"copies cannot be issued as {issue!r}: {why}; use 'auto'")
    return issue
