"""Copiers move pages between the pool and host pages, each copy in the background and in order; here the CPU's, a thread; knows no blob and no transfer."""

import queue
import threading
import time
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch

from atoll.offload.base_worker import Fence
from atoll.offload.runs import Runs


class Way(StrEnum):
    """Which side is written."""

    LOAD = "load"  # host pages -> pool
    STORE = "store"  # pool -> host pages


class Copy(Protocol):
    """Runs that are being copied. Those of one way end in the order in which they were started."""

    def has_ended(self) -> bool:
        """Whether nothing reads or writes on its behalf any more."""
        ...

    @property
    def error(self) -> str | None:
        """Once it has ended: why not every byte is there; None: all are."""
        ...

    @property
    def seconds(self) -> float:
        """Once it has ended: how long it took from its turn on."""
        ...


class Copier(Protocol):
    """Called by one thread."""

    def start(self, way: Way, runs: Runs, fence: Fence) -> Copy:
        """Copy behind the fence."""
        ...

    def order_behind(self, copy: Copy) -> None:
        """Whatever is issued from here on to the current stream sees what an ended copy brought."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Start nothing more, drop what has not begun; whether all else has ended by then. May be called twice."""
        ...


class ThreadCopy:
    """A copy of the thread; `error` and `seconds` are written before it says that it has ended."""

    def __init__(self, way: Way, runs: Runs, copier: "ThreadCopier") -> None:
        self.way, self.runs = way, runs
        self.error: str | None = None
        self.seconds = 0.0
        self.is_done = False
        self._copier = copier

    def has_ended(self) -> bool:
        # Asked first: a thread that ends after its last copy has still made it.
        is_alive = self._copier.is_alive
        if not self.is_done and not is_alive:
            self.error = "the thread that copies pages has died; restart the engine"
            self.is_done = True
        return self.is_done


class ThreadCopier:
    """One thread, one copy after the other. A CPU computes as it is called, so what a fence stands behind is done."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor) -> None:
        # NumPy copies without the interpreter's lock, and without torch's threads, which the model computes with.
        self._pool, self._host = pool.numpy(), host.numpy()  # [P, page_bytes], [N, page_bytes] uint8
        self._queue: queue.SimpleQueue[ThreadCopy | None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="atoll-page-copies", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, way: Way, runs: Runs, fence: Fence) -> ThreadCopy:
        copy = ThreadCopy(way, runs, self)
        self._queue.put(copy)
        return copy

    def order_behind(self, copy: Copy) -> None:
        """An ended copy is in memory already."""

    def close(self, timeout_s: float) -> bool:
        self._is_closing = True
        self._queue.put(None)
        # A thread that has nothing to do ends at once, but not in no time.
        self._thread.join(max(1.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            copy = self._queue.get()
            if copy is None or self._is_closing:
                return
            begin = time.perf_counter()
            self.copy_runs(copy.way, copy.runs)
            copy.seconds = time.perf_counter() - begin
            copy.is_done = True

    def copy_runs(self, way: Way, runs: Runs) -> None:
        """The copy itself."""
        source, target = (self._host, self._pool) if way is Way.LOAD else (self._pool, self._host)
        for page, slot, length in zip(runs.pages.tolist(), runs.slots.tolist(), runs.lengths.tolist(), strict=True):
            first, into = (slot, page) if way is Way.LOAD else (page, slot)
            np.copyto(target[into : into + length], source[first : first + length])
