"""Aborts, preemptions and resets at every point of a transfer's life, and what fails there: others never notice, and every page comes back."""

from collections.abc import Callable
from typing import Any

import pytest

from atoll.engine.scheduler import Scheduler
from atoll.engine.step import Step
from tests.offload.cases import GRID, Bench, answers, evict_all, prompt
from tests.offload.paces import Outcome, all_arrives, half_of_each_load, loads_fail, never, states_fail, stores_fail

LONG = prompt(150)
OTHER = prompt(140, seed=201)

LOAD_POINTS = ["before the run", "begun", "half way", "copied", "told"]
STORE_POINTS = ["before the metadata", "before the run", "begun", "half way", "copied", "told"]
Deed = Callable[[], object]


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def before_the_run(bench: Bench, deed: Deed, wanted: Callable[[Step], bool]) -> None:
    """Do it between a schedule and the run of the first step that is wanted."""
    execute, done = bench.engine.runner.execute, [False]

    def interrupted(step: Step) -> Any:
        if wanted(step) and not done[0]:
            done[0] = True
            deed()
            bench.engine.check()
        return execute(step)

    bench.monkeypatch.setattr(bench.engine.runner, "execute", interrupted)
    for _ in range(20):
        if not done[0]:
            bench.step()
    assert done[0], "that point was never reached"


def at_point_of_load(bench: Bench, point: str, deed: Deed) -> None:
    """A request has been added whose load goes no further than the point at which the deed is done."""
    if point == "before the run":
        return before_the_run(bench, deed, lambda step: bool(step.metadata.loads))
    bench.step()
    [flight] = bench.worker.loads
    if point != "begun":
        bench.worker.holds_loads = point == "copied"
        bench.worker.advance(flight, len(flight.copies) // 2 if point == "half way" else None)
        bench.step()
    assert (flight not in bench.worker.loads) == (point == "told")
    deed()


def at_point_of_store(bench: Bench, point: str, deed: Deed) -> None:
    if point == "before the run":
        return before_the_run(bench, deed, lambda step: bool(step.metadata.stores))
    while not bench.connector.pending:
        bench.step()
    if point != "before the metadata":
        bench.step()
        flight = bench.worker.stores[0]
        if point != "begun":
            bench.worker.holds_stores = point == "copied"
            bench.worker.advance(flight, len(flight.copies) // 2 if point == "half way" else None)
            bench.step()
        assert (flight not in bench.worker.stores) == (point == "told")
    deed()


def finish(bench: Bench) -> None:
    """Everybody else to the end, under hanging transfers first, then with them."""
    bench.engine.check()
    bench.step(4)
    bench.worker.release()
    bench.run()
    bench.check()


LOADS: list[tuple[str, Outcome]] = [
    ("llama", all_arrives),
    ("llama", loads_fail),
    ("qwen3_5", all_arrives),
    ("qwen3_5", half_of_each_load),
    ("qwen3_5", states_fail),
]
STORES: list[tuple[str, Outcome]] = [("llama", all_arrives), ("llama", stores_fail), ("qwen3_5", all_arrives)]


def label(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("name", "outcome"), LOADS, ids=label)
@pytest.mark.parametrize("point", LOAD_POINTS)
def test_an_abort_at_any_point_of_a_load(name: str, point: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never)
    bench.store(LONG)
    bench.worker.outcome = outcome
    other = bench.add(OTHER, max_tokens=9)
    bench.step()
    aborted = bench.add(LONG)
    at_point_of_load(bench, point, lambda: bench.engine.abort(aborted))
    again = bench.add(LONG)
    finish(bench)
    assert [bench.outputs[one].token_ids for one in (other, again)] == [answers(name, [OTHER], 9)[0], answers(name, [LONG])[0]]
    assert outcome is not all_arrives or bench.outputs[again].num_cached_tokens >= 2 * GRID


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_preemption_of_another_at_any_point_of_a_load(name: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never)
    bench.store(LONG)
    other = bench.add(OTHER, max_tokens=9)
    bench.step(2)
    fetched = bench.add(LONG)

    def preempt() -> None:
        bench.engine.scheduler.preempt_latest()

    # Not between a step and its commit, where nobody is preempted.
    if point == "before the run":
        at_point_of_load(bench, "begun", preempt)
    else:
        at_point_of_load(bench, point, preempt)
    finish(bench)
    assert [bench.outputs[one].token_ids for one in (other, fetched)] == [answers(name, [OTHER], 9)[0], answers(name, [LONG])[0]]
    assert bench.outputs[other].num_preemptions + bench.outputs[fetched].num_preemptions == 1


@pytest.mark.parametrize(("name", "outcome"), STORES, ids=label)
@pytest.mark.parametrize("deed", ["abort", "preempt"])
@pytest.mark.parametrize("point", STORE_POINTS)
def test_an_end_at_any_point_of_a_store(name: str, point: str, deed: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never, outcome)
    ids = [bench.add(OTHER, max_tokens=9), bench.add(LONG)]
    if deed == "preempt" and point == "before the run":
        # Nobody is preempted between a step and its commit.
        point = "begun"
    at_point_of_store(bench, point, lambda: bench.engine.abort(ids[1]) if deed == "abort" else bench.engine.scheduler.preempt_latest())
    evict_all(bench.llm)
    bench.engine.check()
    finish(bench)
    assert bench.outputs[ids[0]].token_ids == answers(name, [OTHER], 9)[0]
    assert deed == "abort" or bench.outputs[ids[1]].token_ids == answers(name, [LONG])[0]
    # Whatever arrived there is right.
    assert bench.serve(LONG).token_ids == answers(name, [LONG])[0]
    assert bench.serve(OTHER, 9).token_ids == answers(name, [OTHER], 9)[0]
    bench.check()


@pytest.mark.parametrize("point", STORE_POINTS)
def test_an_end_of_everybody_at_any_point_of_a_store(name: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never)
    for one in (LONG, OTHER):
        bench.add(one)
    at_point_of_store(bench, point, bench.engine.abort_all)
    bench.step(2)
    bench.worker.release()
    bench.llm.reset_prefix_cache()
    bench.engine.pool.check(held=())
    assert bench.serve(LONG).token_ids == answers(name, [LONG])[0]
    bench.check()


@pytest.mark.parametrize("num_steps", range(1, 14, 4))
def test_preemptions_for_want_of_pages_while_nothing_ends(name: str, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool too small for both, whose stores hang for some steps: who needs a page waits for it or takes it, and nobody loses a row."""
    bench = Bench(name, monkeypatch, never, options={"num_pages": 24})
    ids = [bench.add(LONG, max_tokens=40), bench.add(OTHER, max_tokens=40)]
    bench.step(num_steps * 6)
    bench.worker.release()
    bench.run()
    assert [bench.outputs[one].token_ids for one in ids] == answers(name, [LONG, OTHER], 40)
    bench.check()


@pytest.mark.parametrize("num_pages", [18, 21, 24])
def test_who_needs_the_pages_of_a_load_that_hangs(name: str, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for them, first as long as anybody waits for a load, and then as long as it may still write."""
    bench = Bench(name, monkeypatch, never, options={"num_pages": num_pages, "max_model_len": 180})
    bench.store(LONG)
    now = [0.0]
    assert bench.engine.scheduler.offloader is not None
    monkeypatch.setattr(bench.engine.scheduler.offloader, "_clock", lambda: now[0])
    ids = [bench.add(LONG), bench.add(OTHER, max_tokens=35)]
    bench.step(12)
    assert bench.worker.loads
    now[0] = 31.0
    bench.step(12)
    assert bench.engine.has_work
    bench.worker.release()
    bench.run()
    assert [bench.outputs[one].token_ids for one in ids] == [*answers(name, [LONG]), *answers(name, [OTHER], 35)]
    bench.check()


# Negative control


def test_control_a_lease_that_is_never_given_back_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never)
    bench.add(LONG)
    bench.run()
    assert bench.engine.scheduler.offloader is not None
    monkeypatch.setattr(Scheduler, "complete", lambda self, completions: None)
    bench.worker.release()
    bench.worker.poll()
    with pytest.raises(AssertionError):
        bench.check()
