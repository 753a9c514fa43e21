"""The tiers' worker on a CPU: every byte goes where it should and nowhere else, nothing is told before it has happened, a dead thread is a failed transfer."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from atoll.errors import ConfigError
from atoll.offload import worker as worker_module
from atoll.offload.base import Completion
from atoll.offload.base_worker import Regions
from atoll.offload.copier import ThreadCopier, ThreadCopy, Way
from atoll.offload.disk import FileThreads
from atoll.offload.host_pages import HostPages
from atoll.offload.moves import Move, MoveKind
from atoll.offload.runs import Runs, make_runs
from atoll.offload.worker import TierWorker
from tests.offload.regions import PAGE_BYTES, WAIT_S, Setting, transfer


def pairs_of(runs: Runs) -> list[tuple[int, int]]:
    return [
        (page + i, slot + i) for page, slot, length in zip(runs.pages.tolist(), runs.slots.tolist(), runs.lengths.tolist(), strict=True) for i in range(length)
    ]


@pytest.mark.parametrize(
    ("pages", "slots", "expected"),
    [
        ([5], [9], [(5, 9, 1)]),
        ([5, 6, 7], [9, 10, 11], [(5, 9, 3)]),
        ([7, 6, 5], [11, 10, 9], [(5, 9, 3)]),  # as a pool gives them: from the last to the first
        ([5, 6, 7], [9, 11, 10], [(5, 9, 1), (7, 10, 1), (6, 11, 1)]),
        ([5, 6, 8, 9], [1, 2, 3, 4], [(5, 1, 2), (8, 3, 2)]),  # adjacent on one side alone
        ([5, 6, 7, 8], [1, 2, 4, 5], [(5, 1, 2), (7, 4, 2)]),
    ],
)
def test_runs(pages: list[int], slots: list[int], expected: list[tuple[int, int, int]]) -> None:
    runs = make_runs(pages, slots)
    assert list(zip(runs.pages.tolist(), runs.slots.tolist(), runs.lengths.tolist(), strict=True)) == expected
    assert runs.num_pages == len(pages) and len(runs) == len(expected)


@given(st.data())
def test_runs_hold_the_same_pairs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    pages = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count, unique=True))
    slots = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count, unique=True))
    pairs = pairs_of(make_runs(pages, slots))
    assert sorted(pairs) == sorted(zip(pages, slots, strict=True))


def check_bytes(pages: Sequence[int], slots: Sequence[int], targets: Sequence[int]) -> None:
    """Pages go to slots and come back to other pages, and no other byte of either side changes."""
    setting = Setting()
    pool, host = setting.pool.clone(), setting.host.pages.clone()
    setting.run(stores=[transfer(1, pages, slots)])
    [stored] = setting.ended(1)
    host[list(slots)] = pool[list(pages)]
    assert stored.ok and torch.equal(setting.host.pages, host), "a store"
    setting.run(loads=[transfer(2, targets, slots)])
    [loaded] = setting.ended(1)
    pool[list(targets)] = host[list(slots)]
    assert loaded.ok and torch.equal(setting.pool, pool), "a load"
    assert torch.equal(setting.host.pages, host), "a load leaves its source alone"
    setting.worker.close(WAIT_S)


ADJACENT = (range(1, 9), range(4, 12), range(20, 28))
SCATTERED = ([9, 3, 17, 30, 4], [2, 29, 11, 0, 12], [39, 1, 22, 21, 20])
MIXED = ([5, 6, 7, 12, 13, 30], [8, 9, 10, 20, 22, 21], [35, 34, 33, 2, 4, 3])


@pytest.mark.parametrize("places", [ADJACENT, SCATTERED, MIXED])
def test_pages_go_and_come_back(places: tuple[Sequence[int], ...]) -> None:
    check_bytes(*places)


def test_runs_that_join_by_one_side_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_slots_alone(pages: Sequence[int], slots: Sequence[int]) -> Runs:
        runs = make_runs(list(range(len(slots))), sorted(slots))
        order = np.argsort(slots)
        return Runs(np.asarray(pages)[order][np.cumsum(runs.lengths) - runs.lengths], runs.slots, runs.lengths)

    monkeypatch.setattr(worker_module, "make_runs", by_slots_alone)
    check_bytes(*ADJACENT)
    with pytest.raises(AssertionError, match="a store"):
        check_bytes(*MIXED)


def test_completions_name_every_span_and_count_the_bytes() -> None:
    setting = Setting()
    loads = [transfer(3, [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], image_pages=3), transfer(4, [9], [9])]
    stores = [transfer(5, [10, 11], [20, 21]), transfer(6, [12], [22])]
    setting.run(loads, stores)
    told = {completion.generation: completion for completion in setting.ended(4)}
    assert {generation: (c.arrived, c.num_bytes, c.error) for generation, c in told.items()} == {
        3: ((True,) * 3, 5 * PAGE_BYTES, None),
        4: ((True,), PAGE_BYTES, None),
        5: ((True, True), 2 * PAGE_BYTES, None),
        6: ((True,), PAGE_BYTES, None),
    }
    # Stores of one step are one copy; each has its pages' share of the time.
    assert told[5].seconds == pytest.approx(2 * told[6].seconds) and told[6].seconds > 0
    assert setting.worker.poll() == []
    setting.worker.close(WAIT_S)


@contextmanager
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first event is set once a copy is under way; none is made before the second is."""
    is_held, may_copy = threading.Event(), threading.Event()
    copy_runs = ThreadCopier.copy_runs

    def held(self: ThreadCopier, way: Way, runs: Runs) -> None:
        is_held.set()
        assert may_copy.wait(WAIT_S)
        copy_runs(self, way, runs)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadCopier, "copy_runs", held)
        yield is_held, may_copy
        may_copy.set()


def check_told_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a copy is held nothing is told and no byte has moved; afterwards it is told once."""
    setting = Setting()
    before, expected = setting.pool.clone(), setting.host.pages[[7, 3]].clone()
    with held_copies(monkeypatch) as (_, may_copy):
        setting.run(loads=[transfer(1, [4, 9], [7, 3])])
        setting.worker.wait(0.02)
        told = setting.worker.poll()
        assert told == [] and torch.equal(setting.pool, before), "told while the copy is held"
        may_copy.set()
        assert [completion.generation for completion in setting.ended(1)] == [1]
    assert torch.equal(setting.pool[[4, 9]], expected)
    setting.worker.close(WAIT_S)


def test_nothing_is_told_before_it_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    check_told_afterwards(monkeypatch)


def test_a_copy_that_says_too_early_that_it_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadCopy, "has_ended", lambda self: True)
    with pytest.raises(AssertionError, match="told while the copy is held"):
        check_told_afterwards(monkeypatch)


def kill_thread_at(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy thread ends at that copy, without having made it."""
    # One of an earlier test may still run: its copies are its own.
    copy_runs, begun = ThreadCopier.copy_runs, Counter[ThreadCopier]()

    def dying(self: ThreadCopier, way: Way, runs: Runs) -> None:
        begun[self] += 1
        if begun[self] >= copies:
            raise RuntimeError("the thread dies")
        copy_runs(self, way, runs)

    monkeypatch.setattr(ThreadCopier, "copy_runs", dying)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)


def check_dead_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever had not been copied fails, what comes later too, and waiting ends."""
    kill_thread_at(2, monkeypatch)
    setting = Setting()
    setting.run(loads=[transfer(1, [4], [7]), transfer(2, [5, 6], [8, 9]), transfer(3, [7], [1])])
    told = {completion.generation: completion for completion in setting.ended(3)}
    assert told[1].ok
    for generation in (2, 3):
        assert not any(told[generation].arrived) and told[generation].num_bytes == 0
        assert told[generation].error == "the thread that copies pages has died; restart the engine"
    setting.run(stores=[transfer(4, [1], [1])])
    [late] = setting.ended(1)
    assert late.generation == 4 and not late.ok
    setting.worker.close(WAIT_S)


def test_a_dead_thread_fails_what_it_had_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    check_dead_thread(monkeypatch)


def test_a_worker_that_does_not_look_at_its_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.offload.regions.WAIT_S", 0.05)
    monkeypatch.setattr(ThreadCopier, "is_alive", True)
    with pytest.raises(AssertionError, match="1 of 3 transfers have ended"):
        check_dead_thread(monkeypatch)


def test_close_drops_what_has_not_begun_and_may_be_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    pool, host = setting.pool.clone(), setting.host.pages.clone()
    with held_copies(monkeypatch) as (is_held, may_copy):
        setting.run(loads=[transfer(1, [4, 5, 6], [7, 8, 9]), transfer(2, [10, 11], [1, 2])])
        # The first copy is under way and cannot be ended: its memory stays.
        assert is_held.wait(WAIT_S)
        setting.worker.close(0.01)
        assert setting.host.num_pages == 30
        may_copy.set()
        setting.worker.close(WAIT_S)
    assert setting.host.num_pages == 0 and setting.host.is_closed
    # Whole or absent.
    pool[[4, 5, 6]] = host[[7, 8, 9]]
    assert torch.equal(setting.pool, pool)
    setting.worker.close(WAIT_S)


def test_wait_returns_at_once_with_nothing_in_flight_and_at_its_time_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    setting.worker.wait(WAIT_S)
    with held_copies(monkeypatch):
        setting.run(loads=[transfer(1, [4], [7])])
        setting.worker.wait(0.01)
        assert setting.worker.poll() == []
    assert setting.ended(1)[0].ok
    setting.worker.close(WAIT_S)


def test_regions_that_do_not_fit_are_refused() -> None:
    worker = TierWorker(HostPages.anonymous(4, PAGE_BYTES))
    with pytest.raises(ConfigError, match="pages have 8192 bytes, host pages 4096"):
        worker.register(Regions(torch.zeros(4, 2 * PAGE_BYTES, dtype=torch.uint8), 0))
    with pytest.raises(ConfigError, match="one behind the other"):
        worker.register(Regions(torch.zeros(4, 2 * PAGE_BYTES, dtype=torch.uint8)[:, :PAGE_BYTES], 0))
    worker.close(WAIT_S)


@pytest.mark.parametrize(("page", "slot"), [(0, 1), (40, 1), (1, 30), (1, -1)])
def test_places_outside_are_a_bug(page: int, slot: int) -> None:
    setting = Setting()
    with pytest.raises(AssertionError, match="are not all of"):
        setting.run(loads=[transfer(1, [page, 3], [slot, 4])])
    setting.worker.close(WAIT_S)


class FakeFiles(FileThreads):
    """Notes what it is told, and when."""

    def __init__(self, log: list[str]) -> None:
        self.done = threading.Event()
        self.log = log
        self.told: list[Completion] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.told)

    def submit(self, moves: Sequence[Move]) -> None:
        self.log.append("moves")
        self.told += [Completion(move.generation, (True,)) for move in moves if move.kind is not MoveKind.VOID]
        if self.told:
            self.done.set()

    def poll(self) -> list[Completion]:
        told, self.told = self.told, []
        self.done.clear()
        return told

    def close(self, timeout_s: float) -> None:
        self.log.append("closed")


def logged_starts(log: list[str]) -> Callable[..., object]:
    start = ThreadCopier.start

    def logged(self: ThreadCopier, way: Way, runs: Runs, fence: object) -> object:
        log.append(way.value)
        return start(self, way, runs, fence)  # type: ignore[arg-type]

    return logged


def test_moves_are_handed_on_before_the_copies_and_told_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(ThreadCopier, "start", logged_starts(log))
    host = HostPages.anonymous(30, PAGE_BYTES)
    setting = Setting(worker=TierWorker(host, FakeFiles(log)))
    moves = (Move(0, MoveKind.VOID, host_slots=(3,)), Move(-1, MoveKind.WRITE, host_slots=(4,), disk_slots=(1,)))
    setting.run(stores=[transfer(1, [4], [3])], note=moves)
    # A record is to be void soon after a store writes over its slot.
    assert log == ["moves", "store"]
    assert {completion.generation for completion in setting.ended(2)} == {1, -1}
    setting.worker.wait(WAIT_S)
    assert setting.worker.poll() == []
    setting.worker.close(WAIT_S)
    assert log[-1] == "closed" and host.num_pages == 0
