"""A disk that does not answer: one wait in vain, then misses at once, a try now and then, and all as before when it is back."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.offload import Completion, Found, Transfer
from atoll.offload.connector import TieredConnector
from atoll.offload.slab import Slab
from atoll.offload.suspicion import RETRY_S, Suspicion
from tests.offload.cases import answers, evict_all, greedy, make_llm, prompt, tokens
from tests.offload.tier_kit import FakeWorker, digest, kv, make_connector, store, turn, values_of


class Hung:
    """Blobs 1 to 8 are on the disk, the last four in the host tier too; a read of blob 1 does not end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.worker = FakeWorker()
        self.connector = make_connector(4, 20, clock=lambda: self.now_s)
        for number in range(1, 9):
            store(self.connector, self.worker, number, [kv(number, number)])
        assert self.load(90, 1) and self.step() == []

    def load(self, generation: int, *numbers: int) -> bool:
        return self.connector.after_allocation(Transfer(generation, tuple(kv(number, 20 + number) for number in numbers)))

    def step(self) -> list[Completion]:
        self.worker.run(self.connector.build_metadata(0, ()))
        told = self.connector.complete([])
        self.connector.check()
        return told

    def found(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.connector.lookup([digest(number)], 0) == Found(1)]

    def answer(self, index: int = 0, fails: bool = False) -> list[Completion]:
        told = self.connector.complete(self.worker.finish(index, fails=fails))
        self.connector.check()
        return told

    @property
    def is_suspect(self) -> bool:
        return self.connector.stats.tiers[1].is_suspect


@pytest.fixture
def hung() -> Hung:
    return Hung()


def test_a_read_in_time_is_no_reason(hung: Hung) -> None:
    hung.now_s = 9.9
    assert hung.step() == [] and hung.found(1, 2, 8) == [1, 2, 8] and not hung.is_suspect
    hung.answer()
    hung.now_s = 100.0
    assert [done.ok for done in turn(hung.connector, hung.worker)] == [True] and not hung.is_suspect


def test_a_read_that_takes_too_long_makes_a_miss_of_what_the_disk_alone_has(hung: Hung, caplog: pytest.LogCaptureFixture) -> None:
    assert hung.load(91, 2) and hung.load(92, 3, 8)
    hung.now_s = 10.0
    told = hung.step()
    # Those who wait for the disk wait no more; what the host tier has still comes.
    assert [(done.generation, done.arrived, done.error) for done in told] == [(generation, (False,), "the disk does not answer") for generation in (90, 91)]
    assert hung.found(*range(1, 9)) == [8] and hung.is_suspect
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "has not answered for 10 s" in caplog.text
    hung.step()
    assert [name for name, _ in hung.worker.in_flight] == ["read"] * 3 + ["load"]
    assert [(done.generation, done.arrived) for done in hung.answer(3)] == [(92, (False, True))]
    # What is computed instead is kept in memory, though the disk has it.
    store_again = hung.connector.prepare_store(Transfer(93, (kv(4, 4),)))
    assert store_again is not None and len(caplog.records) == 1


def test_control_with_all_the_time_in_the_world_everybody_waits(hung: Hung) -> None:
    hung.connector._suspicion._timeout_s = float("inf")
    assert hung.load(91, 2)
    hung.now_s = 1e6
    assert hung.step() == [] and hung.found(1, 2, 8) == [1, 2, 8]


def test_it_is_tried_now_and_then_by_one(hung: Hung, caplog: pytest.LogCaptureFixture) -> None:
    hung.now_s = 10.0
    hung.step()
    hung.now_s += RETRY_S - 0.1
    assert hung.found(1, 2, 3) == []
    hung.now_s += 0.1
    # What waits for the late read itself is no try.
    assert hung.found(1, 2, 3) == [2, 3]
    assert hung.load(91, 2, 3)
    assert hung.found(4, 8) == [8] and hung.is_suspect
    hung.now_s += 10.0
    assert [done.generation for done in hung.step()] == [91]
    hung.now_s += RETRY_S
    assert hung.found(2, 3, 4) == [4] and hung.load(92, 4)
    hung.step()
    with caplog.at_level(logging.INFO):
        hung.answer(index=len(hung.worker.in_flight) - 1)
    assert not hung.is_suspect and "answers again" in caplog.text
    assert [done.generation for done in turn(hung.connector, hung.worker)] == [92]
    assert hung.worker.pool[24] == values_of(kv(4, 0))[0]
    assert hung.found(*range(1, 9)) == [*range(1, 9)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_late_read_itself_may_end(hung: Hung, fails: bool) -> None:
    hung.now_s = 10.0
    hung.step()
    assert hung.answer(fails=fails) == [] and hung.is_suspect == fails
    assert hung.found(1) == ([] if fails else [1])
    assert turn(hung.connector, hung.worker) == []
    hung.now_s += RETRY_S
    assert hung.found(1, 2) == ([2] if fails else [1, 2])


def test_nothing_is_lost_by_a_read_that_ends_after_its_load_was_cancelled(hung: Hung) -> None:
    assert hung.connector.cancel(90)
    hung.now_s = 10.0
    assert hung.step() == [] and hung.is_suspect
    hung.answer()
    assert hung.connector.host.num_available == 4


# A whole engine.


@contextmanager
def hanging_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gate, read = threading.Event(), Slab.read

    def hang(*args: object) -> bool:
        gate.wait()
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "read", hang)
    try:
        yield
    finally:
        gate.set()


def num_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """For four requests that begin differently, on a disk that hangs."""
    begun: list[Transfer] = []
    accept = TieredConnector.after_allocation
    monkeypatch.setattr(TieredConnector, "after_allocation", lambda self, load: begun.append(load) or accept(self, load))
    work = [prompt(70, seed) for seed in (201, 202, 203, 204)]
    with make_llm("llama", offload=f"host:1MiB,disk:{folder}/:8MiB", offload_timeout_s=0.2) as llm:
        llm.generate(work, greedy())
        assert llm.engine._drain(lambda: llm.engine.has_pending_transfers, 20.0) and llm.engine.offload is not None
        host = llm.engine.offload.connector.host  # type: ignore[attr-defined]
        for key in host.keys:
            host.drop(host.get(key))
        evict_all(llm)
        with hanging_reads(monkeypatch):
            outputs = [llm.generate([one], greedy())[0] for one in work]
            assert tokens(outputs) == answers("llama", work)
            assert not any(output.num_fetched_tokens for output in outputs)
            llm.engine.check()
    return len(begun)


def test_one_request_waits_for_a_disk_that_hangs_and_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_loads(tmp_path, monkeypatch) == 1


def test_control_without_suspicion_each_of_them_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspicion, "has_late_reads", lambda self: False)
    assert num_loads(tmp_path, monkeypatch) == 4
