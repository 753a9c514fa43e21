"""The guard's pure part: every page that becomes free is reported, once, however it became free."""

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import SchedulerConfig
from atoll.engine.request import Request
from atoll.engine.sampling import SamplingParams
from atoll.engine.scheduler import Scheduler
from atoll.kv import PageLedger, ReleaseGuard


def test_importing_the_guard_imports_no_torch() -> None:
    code = "import sys, atoll.kv.guard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pages_are_taken_once_in_order_of_release() -> None:
    guard = ReleaseGuard()
    for page in (5, 2, 5, 9):
        guard.released(page)
    assert guard.num_pending == 3
    assert guard.take() == [5, 2, 9]
    assert guard.take() == [] and guard.num_pending == 0
    guard.released(5)
    assert guard.take() == [5]


def test_dirty_pages_are_the_first_taken() -> None:
    guard = ReleaseGuard(dirty=range(1, 4))
    guard.released(2)
    assert guard.take() == [1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "take"]), st.integers(0, 6)), max_size=60))
@settings(max_examples=60)
def test_every_page_that_becomes_free_is_reported(calls: list[tuple[str, int]]) -> None:
    guard = ReleaseGuard()
    ledger = PageLedger(9, on_free=guard.released)
    held: list[int] = []
    for call, number in calls:
        free = set(ledger._free)
        pending = set(guard._pages)
        if call == "allocate" and number <= ledger.num_free:
            held += ledger.allocate(number)
        elif call == "retain" and held:
            ledger.retain([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif call == "release":
            gone, held = held[:number], held[number:]
            ledger.release(gone)
        elif call == "take":
            assert set(guard.take()) == pending
            pending = set()
        assert set(guard._pages) == pending | (set(ledger._free) - free)
        ledger.check(held)


def make_scheduler(num_pages: int) -> tuple[Scheduler, ReleaseGuard]:
    guard = ReleaseGuard()
    config = SchedulerConfig(page_size=4, max_model_len=40, max_num_seqs=4)
    return Scheduler(config, PageLedger(num_pages, on_free=guard.released), None, guard), guard


def make_request(request_id: int, num_tokens: int) -> Request:
    return Request(request_id, [7] * num_tokens, SamplingParams(max_tokens=20), seed=0, max_tokens=20)


def test_a_finished_requests_pages_are_cleared_by_the_next_step() -> None:
    scheduler, _ = make_scheduler(20)
    first = make_request(0, 10)
    scheduler.add(first)
    assert scheduler.schedule().metadata.clears == ()
    pages = list(first.pages)
    scheduler.finish(first)
    scheduler.add(make_request(1, 5))
    step = scheduler.schedule()
    assert sorted(step.metadata.clears) == sorted(pages)
    # Handed out again in the very step that clears them.
    assert set(step.rows[0].pages) <= set(step.metadata.clears)
    assert scheduler.schedule().metadata.clears == ()


def test_pages_that_this_round_preempts_are_cleared_in_this_step() -> None:
    scheduler, _ = make_scheduler(11)
    requests = [make_request(0, 15), make_request(1, 15)]
    for request in requests:
        scheduler.add(request)
    while True:
        lost = list(requests[1].pages)
        step = scheduler.schedule()
        if step.preempted:
            break
        scheduler.commit(step, dict(enumerate(requests)))
        for request in requests:
            request.output_token_ids.append(7)
    assert step.preempted == [1] and sorted(step.metadata.clears) == sorted(lost)
    assert set(step.rows[0].pages) & set(step.metadata.clears), "the page that the first one needed was the second one's"


def test_without_a_guard_no_step_clears() -> None:
    scheduler = Scheduler(SchedulerConfig(page_size=4, max_model_len=40, max_num_seqs=4), PageLedger(20))
    request = make_request(0, 10)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.finish(request)
    scheduler.add(make_request(1, 5))
    assert scheduler.schedule().metadata.clears == ()
