"""The connector to LMCache, its worker side: copies between the pool and LMCache's memory, in one thread each way; knows no request.

A thread does its transfers one after the other and waits for each in turn, for the fence, for LMCache's disk and for the copies, so that whatever it tells
has happened on the device too. The bytes in LMCache's memory are held by a reference while they are copied, and LMCache frees nothing that is referenced.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

import torch

from atoll.errors import ConfigError
from atoll.offload.base import Completion, Metadata, Span, Transfer
from atoll.offload.base_worker import Fence, Regions
from atoll.offload.lmcache import names_of
from atoll.offload.lmcache_store import Key, LMCacheStore, Memory

# Of LMCache's memory, at most this share is held by one thread at a time, so that neither keeps the other waiting for room, nor a read for itself.
MAX_HELD_SHARE = 1 / 4
# And no more than this, so that a large transfer does not hold what others could have evicted.
MAX_HELD_BYTES = 256 * 2**20
# What is idle ends within this, however little time the caller has for what is in flight.
CLOSE_GRACE_S = 1.0


class LMCacheWorker:
    """Loads and stores do not wait for each other."""

    def __init__(self, store: LMCacheStore) -> None:
        self._store = store
        self._movers: tuple[_Mover, ...] = ()

    def register(self, regions: Regions) -> None:
        blob_bytes = max(1, regions.image_pages) * regions.page_bytes
        max_held_bytes = min(int(self._store.capacity_bytes * MAX_HELD_SHARE), MAX_HELD_BYTES)
        if blob_bytes > self._store.capacity_bytes * MAX_HELD_SHARE:
            self._store.close()
            raise ConfigError(
                f"the largest blob, {'a page' if regions.image_pages <= 1 else 'a state'} of {blob_bytes} bytes, is more than a quarter of LMCache's memory of "
                f"{self._store.capacity_bytes} bytes; give a max_local_cpu_size of {4 * blob_bytes / 2**30:.3g} (GiB) or more"
            )
        self._done = threading.Event()
        self._loads = _Loads(self._store, regions, max_held_bytes, self._done)
        self._stores = _Stores(self._store, regions, max_held_bytes, self._done)
        self._movers = (self._loads, self._stores)

    def run(self, metadata: Metadata, fence: Fence) -> None:
        self._loads.add(metadata.loads, fence)
        self._stores.add(metadata.stores, fence)

    def poll(self) -> list[Completion]:
        self._done.clear()
        return [completion for mover in self._movers for completion in mover.poll()]

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(mover.is_busy for mover in self._movers) and (left := deadline - time.monotonic()) > 0:
            # A thread that died sets nothing; it is looked after now and then.
            if self._done.wait(min(left, 0.1)) or any(mover.is_busy and not mover.is_alive for mover in self._movers):
                return

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + max(timeout_s, CLOSE_GRACE_S)
        for mover in self._movers:
            mover.stop()
        for mover in self._movers:
            mover.join(max(0.0, deadline - time.monotonic()))
        # LMCache gives its memory back as it closes. Under a copy that still runs, it is better left to the end of the process.
        if not any(mover.is_alive for mover in self._movers):
            # It writes to disk first what it has taken for it, which may be much.
            closing = threading.Thread(target=self._store.close, name="lmcache-close", daemon=True)
            closing.start()
            closing.join(max(0.0, deadline - time.monotonic()))


class _Mover:
    """A thread with the transfers of one direction."""

    name: str

    def __init__(self, store: LMCacheStore, regions: Regions, max_held_bytes: int, done: threading.Event) -> None:
        self._store, self._pages, self._max_held_bytes, self._done = store, regions.pages, max_held_bytes, done
        self._page_bytes = regions.page_bytes
        self._stream = torch.cuda.Stream(regions.device) if regions.device.type == "cuda" else None
        self._queue: queue.SimpleQueue[tuple[Transfer, Fence] | None] = queue.SimpleQueue()
        self._in_flight: dict[int, Transfer] = {}
        self._ended: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=f"lmcache-{self.name}", daemon=True)
        self._thread.start()

    # What the engine's thread calls.

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def add(self, transfers: Iterable[Transfer], fence: Fence) -> None:
        for transfer in transfers:
            self._in_flight[transfer.generation] = transfer
            self._queue.put((transfer, fence))

    def poll(self) -> list[Completion]:
        # Asked before the completions are taken: what a thread told before it died is among them.
        alive = self.is_alive
        ended = []
        while not self._ended.empty():
            completion = self._ended.get()
            del self._in_flight[completion.generation]
            ended.append(completion)
        if not alive and self._in_flight:
            if self._stream is not None:
                # Copies that it began may still run.
                self._stream.synchronize()
            reason = f"the thread lmcache-{self.name} has ended"
            ended += [Completion(generation, (False,) * len(t.spans), error=reason) for generation, t in self._in_flight.items()]
            self._in_flight.clear()
        return ended

    def stop(self) -> None:
        self._stopping = True
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # What the thread does.

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
        # The pool may have been made in inference mode, outside of which torch refuses to write into it.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            while (item := self._queue.get()) is not None and not self._stopping:
                self._ended.put(self._move(*item))
                self._done.set()

    def _move(self, transfer: Transfer, fence: Fence) -> Completion:
        if fence.event is not None:
            # What was issued before the fence writes these pages, or clears them; no copy is issued before it is done.
            fence.event.synchronize()
        start_s = time.perf_counter()
        arrived: list[bool] = []
        num_bytes = 0
        errors: list[str] = []
        for group in self._groups(transfer):
            try:
                reasons = self._move_group(group)
            except Exception as error:  # noqa: BLE001 - whatever LMCache raises is a transfer that failed
                reasons = [f"{type(error).__name__}: {error}"] * len(group)
            for (span, _), reason in zip(group, reasons, strict=True):
                arrived.append(reason is None)
                if reason is None:
                    num_bytes += self._num_bytes(span)
                else:
                    errors.append(f"{span.kind.value} {span.digest.hex()}: {reason}")
        first = errors[0] if errors else None
        return Completion(transfer.generation, tuple(arrived), time.perf_counter() - start_s, num_bytes, first)

    def _move_group(self, group: list[tuple[Span, Key]]) -> list[str | None]:
        """For each span None, or why it did not arrive. When it returns, or raises, no copy runs."""
        raise NotImplementedError

    def _groups(self, transfer: Transfer) -> Iterator[list[tuple[Span, Key]]]:
        """Spans with LMCache's names for them, so many as may be held at a time."""
        group: list[tuple[Span, Key]] = []
        num_bytes = 0
        for span, key in zip(transfer.spans, names_of(transfer), strict=True):
            if group and num_bytes + self._num_bytes(span) > self._max_held_bytes:
                yield group
                group, num_bytes = [], 0
            group.append((span, key))
            num_bytes += self._num_bytes(span)
        if group:
            yield group

    def _num_bytes(self, span: Span) -> int:
        return len(span.pages) * self._page_bytes

    def _copies(self, span: Span, memory: Memory) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A page of the pool and its place in LMCache's memory."""
        data = self._store.data(memory, self._num_bytes(span)).view(len(span.pages), self._page_bytes)
        return zip((self._pages[page] for page in span.pages), data, strict=True)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _Loads(_Mover):
    name = "loads"

    def _move_group(self, group: list[tuple[Span, Key]]) -> list[str | None]:
        memories: list[Memory] = []
        reasons: list[str | None] = []
        try:
            for span, key in group:
                try:
                    memory = self._store.get(key, self._num_bytes(span))
                except Exception as error:  # noqa: BLE001 - of one blob; the others may be read all the same
                    reasons.append(f"LMCache cannot read it: {type(error).__name__}: {error}")
                    continue
                if memory is None:
                    reasons.append("LMCache has it no more, or not as it was put")
                    continue
                reasons.append(None)
                memories.append(memory)
                for page, data in self._copies(span, memory):
                    page.copy_(data, non_blocking=True)
        finally:
            self._synchronize()
            for memory in memories:
                self._store.release(memory)
        return reasons


class _Stores(_Mover):
    name = "stores"

    def _move_group(self, group: list[tuple[Span, Key]]) -> list[str | None]:
        memories: list[Memory] = []
        reasons: list[str | None] = []
        try:
            for span, _ in group:
                memory = self._store.allocate(self._num_bytes(span))
                memories.append(memory)
                if memory is not None:
                    for page, data in self._copies(span, memory):
                        data.copy_(page, non_blocking=True)
        except BaseException:
            self._synchronize()
            for memory in memories:
                if memory is not None:
                    self._store.release(memory)
            raise
        # Before LMCache sees the bytes, which it may write to disk at once.
        self._synchronize()
        for (span, key), memory in zip(group, memories, strict=True):
            if memory is None:
                reasons.append("LMCache has no room, and nothing that it may evict")
                continue
            try:
                self._store.put(key, memory, self._num_bytes(span))
                reasons.append(None)
            except Exception as error:  # noqa: BLE001 - of one blob
                reasons.append(f"LMCache cannot take it: {type(error).__name__}: {error}")
        return reasons
