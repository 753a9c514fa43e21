"""Threads that move blobs between host pages and files, and keep the files' records; knows no request and no pool."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from atoll.offload.base import Completion
from atoll.offload.host_pages import HostPages
from atoll.offload.moves import Move, MoveKind
from atoll.offload.slab import Slab

# Apart, so that a load which waits for a disk never waits for what is queued to be written.
NUM_READERS = 2
# One: what is written to a slot's record is written in the order in which it was asked for, a VOID before the record of what comes to lie there next.
NUM_WRITERS = 1


class FileThreads:
    """Runs moves. Nothing here raises for what a disk or a thread does: it is in the completions."""

    def __init__(self, host: HostPages, host_slab: Slab | None, disk_slab: Slab | None) -> None:
        self.done = threading.Event()  # set while `poll` would tell something
        self._host = host
        self._slabs = [slab for slab in (host_slab, disk_slab) if slab is not None]
        self._host_slab = host_slab
        self._disk_slab = disk_slab
        self._lock = threading.Lock()  # of all below
        self._ended: list[Completion] = []
        self._num_in_flight = 0
        self._num_voids = 0  # that have not ended
        self._running: dict[threading.Thread, Move] = {}
        self._has_died = False
        self._is_closed = False
        self._read_queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._write_queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._threads = [self._make_thread(f"atoll-offload-read-{i}", self._read_queue) for i in range(NUM_READERS)]
        self._threads += [self._make_thread(f"atoll-offload-write-{i}", self._write_queue) for i in range(NUM_WRITERS)]
        self._kinds: dict[MoveKind, Callable[[Move], str | None]] = {
            MoveKind.READ: self._read,
            MoveKind.WRITE: self._write,
            MoveKind.RECORD: self._record,
            MoveKind.VERIFY: self._verify,
            MoveKind.VOID: self._void,
        }
        for thread in self._threads:
            thread.start()

    @property
    def num_in_flight(self) -> int:
        """Moves that were submitted and are still to be told of."""
        with self._lock:
            return self._num_in_flight

    @property
    def alive(self) -> bool:
        """Whether every thread runs. Once one has died all moves fail, those to come too."""
        return not self._has_died and all(thread.is_alive() for thread in self._threads)

    def submit(self, moves: Sequence[Move]) -> None:
        """Start them. None waits for a file here, so that no step does."""
        for move in moves:
            is_void = move.kind is MoveKind.VOID
            with self._lock:
                self._num_in_flight += not is_void
                self._num_voids += is_void
            if self._is_closed or not self.alive:
                self._refuse(move)
            else:
                self._queue_of(move).put(move)

    def poll(self) -> list[Completion]:
        """What has ended since the last call, in the moves' generations, one entry in `arrived`."""
        if not self._is_closed and not self.alive:
            self._fail_what_nobody_runs()
        with self._lock:
            ended, self._ended = self._ended, []
            self._num_in_flight -= len(ended)
            self.done.clear()
        return ended

    def close(self, timeout_s: float) -> None:
        """End the threads and close the files; what has not begun after the time is dropped. May be called twice."""
        if self._is_closed:
            return
        end_s = time.monotonic() + timeout_s
        while (self._num_voids or self.num_in_flight > len(self._ended)) and self.alive and time.monotonic() < end_s:
            time.sleep(0.001)
        self._is_closed = True
        for moves, num_threads in ((self._read_queue, NUM_READERS), (self._write_queue, NUM_WRITERS)):
            self._drain(moves)
            for _ in range(num_threads):
                moves.put(None)
        for thread in self._threads:
            # What a thread has begun is one blob. A disk that never answers keeps its thread; the thread's views keep the host memory, and the files stay open.
            thread.join(max(1.0, end_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for slab in self._slabs:
                slab.close()

    def _make_thread(self, name: str, moves: "queue.SimpleQueue[Move | None]") -> threading.Thread:
        # Daemons: an interpreter that ends without `close` does not wait for a disk.
        return threading.Thread(target=self._work, args=(moves,), name=name, daemon=True)

    def _work(self, moves: "queue.SimpleQueue[Move | None]") -> None:
        me = threading.current_thread()
        while (move := moves.get()) is not None:
            self._running[me] = move
            start_s = time.perf_counter()
            try:
                error = self._kinds[move.kind](move)
            except OSError as failure:
                error = f"{move.kind}: {failure.strerror or failure}"
            with self._lock:
                del self._running[me]
            self._end(move, error, time.perf_counter() - start_s)

    def _end(self, move: Move, error: str | None, seconds: float = 0.0) -> None:
        num_bytes = 0 if error else max(len(move.host_slots), len(move.disk_slots)) * self._host.page_bytes
        with self._lock:
            if move.kind is MoveKind.VOID:
                self._num_voids -= 1
                return
            self._ended.append(Completion(move.generation, (error is None,), seconds, num_bytes, error))
            self.done.set()

    def _refuse(self, move: Move) -> None:
        if move.kind is MoveKind.VOID and not self._is_closed:
            # The thread has died, and not the disk: what is forgotten shall not be found again.
            self._void(move)
        self._end(move, "the files' threads have ended")

    def _queue_of(self, move: Move) -> "queue.SimpleQueue[Move | None]":
        return self._read_queue if move.kind in (MoveKind.READ, MoveKind.VERIFY) else self._write_queue

    def _fail_what_nobody_runs(self) -> None:
        """After a thread's death: what it ran and what is queued fail. What living threads run ends by itself: they may still write to its host pages."""
        self._has_died = True
        for thread in self._threads:
            if not thread.is_alive() and (move := self._running.pop(thread, None)) is not None:
                self._end(move, f"thread {thread.name} has died")
        for moves in (self._read_queue, self._write_queue):
            self._drain(moves)

    def _drain(self, moves: "queue.SimpleQueue[Move | None]") -> None:
        while True:
            try:
                move = moves.get_nowait()
            except queue.Empty:
                return
            if move is not None:
                self._refuse(move)

    def _parts(self, move: Move) -> list[memoryview]:
        return [self._host.view(slot) for slot in move.host_slots]

    def _read(self, move: Move) -> str | None:
        assert self._disk_slab is not None
        is_good = self._disk_slab.read(move.blob_kind, move.digest, move.disk_slots, self._parts(move))
        return None if is_good else f"{self._disk_slab.path}: the bytes of a {move.blob_kind} blob are not those that were written"

    def _write(self, move: Move) -> str | None:
        assert self._disk_slab is not None
        self._disk_slab.write(move.blob_kind, move.digest, move.disk_slots, self._parts(move))
        return None

    def _record(self, move: Move) -> str | None:
        assert self._host_slab is not None
        self._host_slab.record(move.blob_kind, move.digest, move.host_slots, self._parts(move))
        return None

    def _verify(self, move: Move) -> str | None:
        assert self._host_slab is not None
        is_good = self._host_slab.verify(move.blob_kind, move.digest, move.host_slots, self._parts(move))
        return None if is_good else f"{self._host_slab.path}: the bytes of a {move.blob_kind} blob are not those that were written"

    def _void(self, move: Move) -> str | None:
        for slab, slots in ((self._host_slab, move.host_slots), (self._disk_slab, move.disk_slots)):
            if slab is not None and slots:
                # A record that stays: other bytes that come to lie there will not have its checksum.
                with contextlib.suppress(OSError):
                    slab.void(slots)
        return None
