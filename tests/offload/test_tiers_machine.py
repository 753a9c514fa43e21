"""The tiers' scheduler side in any order of calls and of ends: what is told to have arrived is what its name says, and no slot has two hands on it."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from atoll.offload import Completion, Found, Span, Transfer
from atoll.offload.lru import Tier
from tests.offload.tier_kit import IMAGE_PAGES, FakeWorker, digest, kv, make_connector, state, values_of


class TierMachine(RuleBasedStateMachine):
    """Any order of calls and of ends, with failures: whatever is told to have arrived is what its name says, and no slot has two hands on it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.connector = make_connector(6, 9, is_mapped=True, clock=lambda: self.now_s)
        self.worker = FakeWorker()
        self.generation = 0
        self.page = 0
        self.loads: dict[int, Transfer] = {}
        self.stores: dict[int, Transfer] = {}

    def pages(self, count: int) -> tuple[int, ...]:
        self.page += count
        return tuple(range(self.page - count, self.page))

    def span(self, number: int, is_state: bool) -> Span:
        return state(number, self.pages(IMAGE_PAGES)) if is_state else kv(number, self.pages(1)[0])

    def told(self, completions: list[Completion]) -> None:
        for done in completions:
            if (load := self.loads.pop(done.generation, None)) is not None:
                assert len(done.arrived) == len(load.spans)
                for span, has_come in zip(load.spans, done.arrived, strict=True):
                    if has_come:
                        assert [self.worker.pool[page] for page in span.pages] == values_of(span)
            else:
                assert self.stores.pop(done.generation).generation == done.generation

    @rule(numbers=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=4, unique=True))
    def offer(self, numbers: list[tuple[int, bool]]) -> None:
        spans = tuple(self.span(*number) for number in numbers)
        for span in spans:
            self.worker.pool.update(zip(span.pages, values_of(span), strict=True))
        self.generation += 1
        taken = self.connector.prepare_store(Transfer(self.generation, spans))
        if taken is not None:
            self.stores[self.generation] = taken

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True))
    def fetch(self, numbers: list[int]) -> None:
        names = [digest(number) for number in numbers]
        found = self.connector.lookup(names, 0)
        reach = max(found.states, default=found.num_pages)
        spans = [self.span(number, False) for number in numbers[:reach]]
        if found.states:
            spans.append(self.span(numbers[reach - 1], True))
        self.generation += 1
        if spans:
            load = self.loads[self.generation] = Transfer(self.generation, tuple(spans))
            assert self.connector.after_allocation(load) and self.connector._loads[self.generation].error is None, "promised and not to be had"

    @rule()
    def step(self) -> None:
        self.worker.run(self.connector.build_metadata(0, ()))

    @precondition(lambda self: self.worker.in_flight)
    @rule(data=st.data(), fails=st.integers(0, 4))
    def end_one(self, data: st.DataObject, fails: int) -> None:
        index = data.draw(st.integers(0, len(self.worker.in_flight) - 1))
        self.told(self.connector.complete(self.worker.finish(index, fails=fails == 0)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        for known in (self.loads, self.stores):
            if known:
                generation = data.draw(st.sampled_from(sorted(known)))
                if self.connector.cancel(generation):
                    del known[generation]

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        """Reads become too late, and a suspect disk is tried again."""
        self.now_s += seconds
        self.told(self.connector.complete([]))

    @rule(number=st.integers(0, 7))
    def forget(self, number: int) -> None:
        self.connector.forget([digest(number)])
        assert self.connector.lookup([digest(number)], 0) == Found()

    @invariant()
    def books_agree(self) -> None:
        self.connector.check()
        self.worker.check_writers()

    def teardown(self) -> None:
        for _ in range(100):
            if self.connector.has_pending_work:
                self.worker.run(self.connector.build_metadata(0, ()))
                self.told(self.connector.complete(self.worker.finish_all()))
        assert not self.connector.has_pending_work and not self.loads and not self.stores
        self.connector.check()
        assert self.connector.host.num_available == self.connector.host.num_slots


# Without shrinking: the negative control would spend minutes on it.
MACHINE = settings(
    max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)


def test_random_orders() -> None:
    run_state_machine_as_test(TierMachine, settings=MACHINE)


def test_random_orders_find_missing_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tier, "_make_room", _evict_anything)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(TierMachine, settings=settings(MACHINE, max_examples=2000, derandomize=True))


def _evict_anything(tier: Tier, num_slots: int) -> None:
    """Eviction as it would be without pins."""
    while len(tier._used) + tier._end_fresh - tier._next_fresh < num_slots and tier._blobs:
        blob = next(iter(tier._blobs.values()))
        del tier._blobs[blob.key]
        blob.is_dropped = True
        tier._free(blob)
