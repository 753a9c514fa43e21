"""How often a waiting request is looked up, counted in walks of its prompt: not again while what it waits for has not come."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from atoll.engine.scheduler import Scheduler
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_tree import PrefixTree
from tests.offload.cases import GRID, PAGE, Bench, answers, prompt
from tests.offload.paces import after_polls, never

LONG = prompt(150)
OTHER = prompt(140, seed=201)
TIGHT = {"num_pages": 18, "max_model_len": 200}  # for one of them


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def count_walks(bench: Bench) -> Counter[str]:
    """Of the pool's tree, and of the connector."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            counts[name] += 1
            return call(*args)

        return counting

    bench.monkeypatch.setattr(PrefixCache, "match", counted("pool", PrefixCache.match))
    bench.monkeypatch.setattr(bench.connector, "lookup", counted("connector", bench.connector.lookup))
    return counts


def blocked(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, int, int]:
    """One request runs, and another waits: what the connector has of it does not fit beside the first."""
    bench = Bench(name, monkeypatch, after_polls(1), options=TIGHT)
    bench.store(OTHER)
    first = bench.add(LONG, max_tokens=40)
    bench.step(2)
    return bench, first, bench.add(OTHER)


def test_one_walk_serves_the_pool_and_the_connector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.serve(LONG)
    scheduler = bench.engine.scheduler
    request = bench.engine._generations[bench.add(LONG + OTHER[:50])].request
    asked: list[bytes] = []
    get = PrefixTree.get
    monkeypatch.setattr(PrefixTree, "get", lambda tree, digest: asked.append(digest) or get(tree, digest))
    match = scheduler._reuse.look_up(request)
    assert scheduler.offloader is not None and scheduler.offloader.look_up(request, match) is None
    # The nine pages that are there, and the first that is not.
    assert asked == request.prefix.digests[:10] and len(match.resident) == 9
    bench.engine.abort_all()
    bench.check()


def test_a_request_that_waits_for_room_is_looked_up_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, first, second = blocked(name, monkeypatch)
    counts = count_walks(bench)
    bench.step(20)
    assert [request.request_id for request in bench.engine.scheduler.waiting] == [second]
    assert counts == {"pool": 1, "connector": 1}
    bench.run()
    assert [bench.outputs[one].token_ids[:6] for one in (first, second)] == answers(name, [LONG, OTHER])
    assert bench.outputs[second].num_fetched_tokens >= 2 * GRID
    # As it was blocked, as there was room for the load, and as that had come.
    assert counts == {"pool": 3, "connector": 2}
    bench.worker.release()
    bench.check()


def test_control_without_this_it_is_looked_up_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_waits_still", lambda *_: False)
    bench, _, _ = blocked(name, monkeypatch)
    counts = count_walks(bench)
    bench.step(20)
    assert counts == {"pool": 20, "connector": 20}
    bench.engine.abort_all()
    bench.worker.release()
    bench.check()


def test_a_request_that_waits_for_budget_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts before it take what each step may compute, but for less than a chunk."""
    bench = Bench("llama", monkeypatch, options={"max_num_batched_tokens": 160, "max_model_len": 250})
    for seed in (201, 202, 203):
        bench.add(prompt(220, seed), max_tokens=2)
    bench.step()
    last = bench.add(LONG)
    counts = count_walks(bench)
    while bench.engine.scheduler.waiting:
        bench.step()
    assert counts["pool"] <= 8, "twice for each of the four requests: when it had to wait, and when not"
    bench.run()
    assert bench.outputs[last].token_ids == answers("llama", [LONG])[0]
    bench.check()


def test_what_another_computes_meanwhile_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second shares the first one's prompt: it fits as soon as the first has computed enough of it, long before that ends."""
    bench = Bench(name, monkeypatch, never, options=TIGHT | {"max_num_batched_tokens": GRID + 3})
    first, second = bench.add(LONG, max_tokens=30), bench.add(LONG[: 2 * GRID + PAGE])
    while bench.engine.scheduler.waiting:
        bench.step()
    assert first not in bench.outputs
    bench.worker.release()
    bench.run()
    assert bench.outputs[second].num_cached_tokens >= 2 * GRID
    assert bench.outputs[second].token_ids == answers(name, [LONG[: 2 * GRID + PAGE]])[0]
    bench.check()


def test_a_load_that_a_request_before_it_began_is_shared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request comes before the one that waits, and loads what both want."""
    bench, first, second = blocked(name, monkeypatch)
    bench.step(3)
    third = bench.add(OTHER)
    bench.engine.scheduler.preempt_latest()
    bench.run()
    assert first in bench.outputs
    assert [bench.outputs[one].token_ids for one in (second, third)] == answers(name, [OTHER, OTHER])
    bench.worker.release()
    bench.check()
