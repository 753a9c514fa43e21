"""The scheduler alone: what a step holds, who is preempted, and that pages always come back; needs no torch."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.config import SchedulerConfig
from atoll.engine.request import Request
from atoll.engine.sampling import SamplingParams
from atoll.engine.scheduler import Scheduler
from atoll.engine.step import Step
from atoll.errors import ConfigError, PoolCorruptError
from atoll.kv.ledger import PageLedger
from atoll.kv.slot_ledger import SlotLedger


def make_scheduler(num_pages: int = 65, num_slots: int | None = None, **options: int) -> Scheduler:
    defaults = {"page_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_grid": 8}
    slots = SlotLedger(num_slots) if num_slots is not None else None
    return Scheduler(SchedulerConfig(**{**defaults, **options}), PageLedger(num_pages), slots)


class Driver:
    """Plays the engine: gives each sampled row a token and finishes requests at their limit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.live: dict[int, Request] = {}
        self.finished: dict[int, Request] = {}
        self.next_id = 0

    def add(self, num_prompt: int, max_tokens: int) -> Request:
        limit = self.scheduler.config.max_model_len
        # Token ids count up through the sequence, so a row with a token of another place shows.
        request = Request(self.next_id, list(range(num_prompt)), SamplingParams(max_tokens=max_tokens), 0, min(max_tokens, limit - num_prompt))
        self.next_id += 1
        self.live[request.request_id] = request
        self.scheduler.add(request)
        return request

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.commit(step, self.live)
        for row in step.rows:
            if row.sample is not None:
                request = self.live[row.request_id]
                request.output_token_ids.append(request.num_tokens)
                if len(request.output_token_ids) >= request.max_tokens:
                    self.finish(request)
        return step

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.finished[request.request_id] = self.live.pop(request.request_id)

    def run(self) -> list[Step]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert len(steps) < 10_000, "no progress"
        return steps


def held_pages(scheduler: Scheduler) -> list[int]:
    return [page for request in scheduler.running for page in request.pages]


def test_chunks_end_on_the_grid_but_for_the_last() -> None:
    driver = Driver(make_scheduler())
    driver.add(num_prompt=45, max_tokens=1)
    steps = driver.run()
    assert [(row.start, len(row.token_ids)) for step in steps for row in step.rows] == [(0, 16), (16, 16), (32, 13)]
    assert [row.sample is not None for step in steps for row in step.rows] == [False, False, True]


def test_decodes_and_a_chunk_share_a_step() -> None:
    driver = Driver(make_scheduler())
    driver.add(num_prompt=3, max_tokens=10)
    driver.step()
    driver.add(num_prompt=30, max_tokens=1)
    step = driver.step()
    assert [(row.request_id, row.start) for row in step.decodes] == [(0, 3)]
    # 15 tokens are left beside the decode, 8 of them on the grid.
    assert [(row.request_id, row.start, len(row.token_ids)) for row in step.prefills] == [(1, 0, 8)]


def test_every_decode_gets_its_token_whatever_is_prefilled() -> None:
    driver = Driver(make_scheduler(max_num_seqs=9))
    for _ in range(8):
        driver.add(num_prompt=1, max_tokens=20)
    driver.step()
    driver.add(num_prompt=60, max_tokens=1)
    for step in [driver.step() for _ in range(7)]:
        assert [row.request_id for row in step.decodes] == list(range(8))
        assert [len(row.token_ids) for row in step.prefills] in ([8], [4])


def test_pages_are_appended_as_rows_need_them() -> None:
    driver = Driver(make_scheduler())
    request = driver.add(num_prompt=7, max_tokens=10)
    counts = []
    for _ in range(6):
        driver.step()
        counts.append(len(request.pages))
    assert counts == [2, 2, 3, 3, 3, 3]


def test_the_latest_arrival_is_preempted_and_loses_no_token() -> None:
    # 6 usable pages of 4: two requests of 8 + 8 tokens need 8.
    driver = Driver(make_scheduler(num_pages=7, max_model_len=24))
    first, second = driver.add(8, 8), driver.add(8, 8)
    preempted = [request_id for step in driver.run() for request_id in step.preempted]
    assert set(preempted) == {second.request_id} and first.num_preemptions == 0
    assert second.num_preemptions == len(preempted) > 0
    assert second.output_token_ids == list(range(8, 16))


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    driver = Driver(make_scheduler(num_pages=7, max_model_len=24, max_num_seqs=2))
    for _ in range(3):
        driver.add(8, 8)
    while not driver.step().preempted:
        pass
    assert [request.request_id for request in driver.scheduler.waiting] == [1, 2]


def test_requests_that_would_only_preempt_are_not_admitted() -> None:
    driver = Driver(make_scheduler(num_pages=7, max_model_len=24))
    driver.add(16, 4)
    driver.add(8, 4)
    # 4 + 2 pages hold both prompts, but not the first token after either.
    step = driver.step()
    assert [row.request_id for row in step.rows] == [0]


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 64 is above the 60 tokens that 15 pages of 4 hold"):
        make_scheduler(num_pages=16)


def test_one_request_alone_can_fill_the_pool() -> None:
    driver = Driver(make_scheduler(num_pages=17))
    request = driver.add(num_prompt=20, max_tokens=1000)
    driver.run()
    assert request.num_tokens == 64 and request.num_preemptions == 0
    driver.scheduler.ledger.check(held=())


def test_a_step_is_plain_data() -> None:
    driver = Driver(make_scheduler())
    request = driver.add(20, 2)
    step = driver.scheduler.schedule()
    row = step.rows[0]
    assert type(row.token_ids) is list and type(row.pages) is list
    assert row.pages is not request.pages, "a step must not change when its request does"


def test_scheduling_needs_no_torch() -> None:
    code = "import sys, atoll, atoll.config, atoll.engine.scheduler; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scheduler_that_forgets_a_page_is_found() -> None:
    class Leaky(Scheduler):
        def _release(self, request: Request, *, discard: bool = False) -> None:
            request.pages = request.pages[1:]
            super()._release(request, discard=discard)

    scheduler = Leaky(make_scheduler().config, PageLedger(65))
    driver = Driver(scheduler)
    request = driver.add(20, 2)
    driver.step()
    driver.finish(request)
    with pytest.raises(PoolCorruptError, match="lost without a release"):
        scheduler.ledger.check(held=())


def test_a_running_request_holds_one_slot_and_keeps_it() -> None:
    driver = Driver(make_scheduler(num_slots=4))
    first = driver.add(num_prompt=45, max_tokens=3)
    assert first.state_slot is None, "it waits"
    seen = {(row.request_id, row.state_slot) for step in [driver.step() for _ in range(3)] for row in step.rows}
    second = driver.add(num_prompt=5, max_tokens=8)
    seen |= {(row.request_id, row.state_slot) for row in driver.step().rows}
    assert seen == {(0, first.state_slot), (1, second.state_slot)} and first.state_slot != second.state_slot
    driver.run()
    assert first.state_slot is None and second.state_slot is None
    assert driver.scheduler.slots is not None and driver.scheduler.slots.num_free == 4


def test_a_preempted_request_gives_its_slot_back_and_starts_anew() -> None:
    driver = Driver(make_scheduler(num_pages=7, num_slots=4, max_model_len=24))
    driver.add(8, 8)
    second = driver.add(8, 8)
    while not driver.step().preempted:
        assert second.state_slot is not None
    assert second.state_slot is None and driver.scheduler.slots is not None and driver.scheduler.slots.num_free == 3
    rows = [row for step in driver.run() for row in step.rows if row.request_id == 1]
    # From position 0, where the runner clears the slot.
    assert rows[0].start == 0 and rows[0].state_slot is not None


def test_a_scheduler_that_forgets_a_slot_is_found() -> None:
    class Leaky(Scheduler):
        def _release(self, request: Request, *, discard: bool = False) -> None:
            request.state_slot = None
            super()._release(request, discard=discard)

    slots = SlotLedger(4)
    driver = Driver(Leaky(make_scheduler().config, PageLedger(65), slots))
    request = driver.add(20, 2)
    driver.step()
    driver.finish(request)
    with pytest.raises(PoolCorruptError, match="slot 0 is held in the books and has 0 holders; it was lost without a release"):
        slots.check(held=())


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps and aborts over a pool that is always too small."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(make_scheduler(num_pages=18, num_slots=4))
        self.scheduler = self.driver.scheduler

    @rule(num_prompt=st.integers(1, 63), max_tokens=st.integers(1, 70))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.driver.add(num_prompt, max_tokens)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def step(self) -> None:
        before = {request_id: request.num_computed for request_id, request in self.driver.live.items()}
        requests = dict(self.driver.live)
        step = self.driver.step()
        assert step.rows, "an empty step while there is work"
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({row.request_id for row in step.rows}) == len(step.rows) <= self.scheduler.config.max_num_seqs
        for row in step.rows:
            request, end = requests[row.request_id], row.start + len(row.token_ids)
            assert row.request_id not in step.preempted
            assert row.start == before[row.request_id] and row.token_ids == list(range(row.start, end))
            assert len(row.pages) == -(-end // 4) and 0 not in row.pages
            assert row.state_slot is not None and request.state_slot in (row.state_slot, None)
            assert row.sample is not None or end % 8 == 0
            assert row.sample is None or row.sample.index == end - len(request.prompt_token_ids)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.driver.live[data.draw(st.sampled_from(sorted(self.driver.live)))]
        self.driver.finish(request)
        assert not request.pages and request.state_slot is None

    @rule()
    def drain(self) -> None:
        self.driver.run()
        assert not self.driver.live
        self.scheduler.ledger.check(held=())

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.ledger.check(held_pages(self.scheduler))
        assert self.scheduler.slots is not None
        self.scheduler.slots.check(held=[request.state_slot for request in self.scheduler.running])  # type: ignore[misc]
        assert not any(request.pages or request.num_computed or request.state_slot is not None for request in self.scheduler.waiting)

    @invariant()
    def queues_are_in_order_of_arrival(self) -> None:
        order = [request.request_id for request in [*self.scheduler.running, *self.scheduler.waiting]]
        assert order == sorted(order)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestSchedulerMachine = SchedulerMachine.TestCase
