"""Records that are voided behind a step's back: in order with what is recorded next, done before the files are closed, and no step waits for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.offload import BlobKind
from atoll.offload.disk import FileThreads
from atoll.offload.host_pages import HostPages
from atoll.offload.moves import Move, MoveKind
from atoll.offload.slab import Slab
from tests.offload.tier_kit import digest

PAGE_BYTES = 4096
NUM_SLOTS = 4


@contextmanager
def files_of(path: Path) -> Iterator[tuple[FileThreads, HostPages]]:
    """A mapped host tier alone."""
    slab = Slab(path, {}, NUM_SLOTS, PAGE_BYTES, is_mapped=True)
    memory, offset = slab.map()
    host = HostPages(memory, offset, NUM_SLOTS, PAGE_BYTES)
    files = FileThreads(host, slab, None)
    try:
        yield files, host
    finally:
        files.close(20.0)
        host.close()


def record(generation: int, number: int, slot: int) -> Move:
    return Move(generation, MoveKind.RECORD, host_slots=(slot,), blob_kind=BlobKind.KV, digest=digest(number))


def void(*slots: int) -> Move:
    return Move(0, MoveKind.VOID, host_slots=slots)


def ended(files: FileThreads, count: int) -> list[int]:
    told: list[int] = []
    deadline_s = time.monotonic() + 20.0
    while len(told) < count:
        told += [done.generation for done in files.poll()]
        assert time.monotonic() < deadline_s, f"{told} of {count} moves have ended"
    return told


def on_file(path: Path) -> list[bytes]:
    slab = Slab(path, {}, NUM_SLOTS, PAGE_BYTES)
    found = [blob.digest for blob in slab.stored()]
    slab.close()
    return found


@contextmanager
def held_voids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Voids wait for the end of the block. Yields the names of the threads that do them."""
    gate, write, names = threading.Event(), Slab.void, list[str]()

    def held(*args: object) -> None:
        names.append(threading.current_thread().name)
        assert gate.wait(20.0)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "void", held)
    try:
        yield names
    finally:
        gate.set()


def test_no_step_waits_for_a_void_and_none_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with files_of(tmp_path / "host") as (files, _):
        files.submit([record(-1, 1, 0)])
        assert ended(files, 1) == [-1]
        with held_voids(monkeypatch) as names:
            files.submit([void(0)])
            assert files.num_in_flight == 0 and files.poll() == []
    # But it is done before the files are closed.
    assert names == ["atoll-offload-write-0"] and on_file(tmp_path / "host") == []


def void_then_record(path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[FileThreads], object]) -> list[bytes]:
    """What the file has of a slot that is voided, slowly, and recorded anew at once."""
    with files_of(path) as (files, host):
        files.submit([record(-1, 1, 0)])
        ended(files, 1)
        with held_voids(monkeypatch):
            files.submit([void(0)])
            host.view(0)[:] = bytes([7]) * PAGE_BYTES
            files.submit([record(-2, 2, 0)])
            wait(files)
    return on_file(path)


def test_a_void_comes_before_the_record_that_is_asked_for_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert void_then_record(tmp_path / "host", monkeypatch, lambda files: None) == [digest(2)]


def test_control_a_void_on_another_thread_takes_the_next_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = FileThreads._queue_of
    monkeypatch.setattr(FileThreads, "_queue_of", lambda self, move: self._read_queue if move.kind is MoveKind.VOID else choose(self, move))
    assert void_then_record(tmp_path / "host", monkeypatch, lambda files: ended(files, 1)) == []


def test_bytes_under_the_record_of_others_are_refused(tmp_path: Path) -> None:
    """As a process leaves them that is killed before the void."""
    with files_of(tmp_path / "host") as (files, host):
        host.view(0)[:] = bytes([1]) * PAGE_BYTES
        files.submit([record(-1, 1, 0)])
        ended(files, 1)
        host.view(0)[:] = bytes([2]) * PAGE_BYTES
    assert on_file(tmp_path / "host") == [digest(1)]
    with files_of(tmp_path / "host") as (files, host):
        files.submit([Move(-1, MoveKind.VERIFY, host_slots=(0,), blob_kind=BlobKind.KV, digest=digest(1))])
        deadline_s = time.monotonic() + 20.0
        while not (told := files.poll()):
            assert time.monotonic() < deadline_s
        assert not told[0].ok and "are not those that were written" in str(told[0].error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_forgotten_after_a_threads_death_is_void_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise RuntimeError("a bug in a thread")

    with files_of(tmp_path / "host") as (files, _):
        files.submit([record(-1, 1, 0), record(-2, 2, 1)])
        ended(files, 2)
        with monkeypatch.context() as patch:
            patch.setattr(Slab, "record", die)
            files.submit([record(-3, 3, 2), void(0)])
            assert ended(files, 1) == [-3]
        files.submit([void(1)])
    assert on_file(tmp_path / "host") == []
