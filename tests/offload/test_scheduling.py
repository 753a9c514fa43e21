"""Requests that wait for loads, and what becomes of them: who parks, who shares a load, what is loaded at all, and who goes on without."""

import pytest

from atoll.offload.base import BlobKind
from tests.offload.cases import GRID, PAGE, Bench, answers, evict_all, greedy, prompt
from tests.offload.paces import a_copy_a_poll, after_polls, loads_fail, never, stores_fail

LONG = prompt(150)
OTHER = prompt(140, seed=201)
THIRD = prompt(70, seed=202)


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(name, monkeypatch, never)


def set_clock(bench: Bench, now: list[float]) -> None:
    assert bench.engine.scheduler.offloader is not None
    bench.monkeypatch.setattr(bench.engine.scheduler.offloader, "_clock", lambda: now[0])


def test_others_run_while_a_request_is_parked(bench: Bench) -> None:
    bench.store(LONG)
    parked, other = bench.add(LONG), bench.add(OTHER)
    bench.step(20)
    assert bench.engine.num_parked == 1 and bench.engine.has_work and bench.engine.has_pending_transfers
    assert bench.outputs[other].token_ids == answers(bench.name, [OTHER])[0]
    assert parked not in bench.outputs
    bench.worker.release()
    bench.run()
    assert bench.outputs[parked].token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_a_parked_request_alone_costs_no_step_and_waits_for_its_worker(bench: Bench) -> None:
    bench.store(LONG)
    bench.add(LONG)
    num_steps, num_waits = bench.engine.num_steps, bench.worker.num_waits
    bench.step(5)
    assert (bench.engine.num_steps, bench.worker.num_waits) == (num_steps, num_waits + 5)
    [flight] = bench.worker.loads
    assert flight.num_polls == 4, "every step polls"
    bench.worker.release()
    bench.run()
    bench.check()


def test_a_load_is_one_transfer_of_what_is_missing(bench: Bench) -> None:
    """Not below what the pool holds: its first pages, and for a hybrid its first state, are here."""
    bench.store(LONG)
    bench.worker.outcome = loads_fail
    bench.worker.release()
    bench.serve(LONG[: GRID + 1], max_tokens=1)
    bench.worker.outcome, bench.worker.pace = (lambda transfer, is_load: [True] * len(transfer.spans)), never
    bench.store_again(LONG)
    num_resident = GRID // PAGE
    request = bench.add(LONG)
    bench.step()
    [flight] = bench.worker.loads
    digests = bench.engine._generations[request].request.prefix.digests
    reach = 9 if bench.name == "llama" else 8
    kv = [span.digest for span in flight.transfer.spans if span.kind is BlobKind.KV]
    assert kv == digests[num_resident:reach]
    assert [span.digest for span in flight.transfer.spans if span.kind is BlobKind.STATE] == ([] if bench.name == "llama" else [digests[7]])
    bench.worker.release()
    bench.run()
    output = bench.outputs[request]
    assert (output.num_cached_tokens, output.num_fetched_tokens) == (reach * PAGE, (reach - num_resident) * PAGE)
    assert output.token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_a_prefix_that_is_in_the_pool_is_not_fetched(bench: Bench) -> None:
    bench.worker.release()
    bench.serve(LONG)
    num_lookups = bench.connector.num_lookups
    output = bench.serve(LONG)
    assert output.num_cached_tokens > 0 == output.num_fetched_tokens and not bench.connector.metadata_with_loads
    assert bench.connector.num_lookups > num_lookups
    bench.check()


def test_a_state_alone_is_loaded_where_its_pages_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    bench.serve(LONG)
    cache = bench.engine.scheduler.cache
    for node in [*cache._tree]:
        if node.checkpoint is not None:
            cache._drop(node.checkpoint)
    output = bench.serve(LONG)
    [load] = bench.connector.metadata_with_loads[-1].loads
    assert [span.kind for span in load.spans] == [BlobKind.STATE]
    assert output.num_fetched_tokens == output.num_cached_tokens == 2 * GRID
    assert output.token_ids == answers("qwen3_5", [LONG])[0]
    bench.check()


# Several who want the same.


def test_two_who_want_the_same_share_a_load(bench: Bench) -> None:
    bench.store(LONG)
    ids = [bench.add(LONG), bench.add(LONG[:140])]
    bench.step(2)
    assert bench.engine.num_parked == 2 and len(bench.worker.loads) == 1
    bench.worker.release()
    bench.run()
    assert len(bench.connector.metadata_with_loads) == 1
    assert [bench.outputs[one].token_ids for one in ids] == answers(bench.name, [LONG, LONG[:140]])
    assert all(bench.outputs[one].num_fetched_tokens >= 2 * GRID for one in ids)
    bench.check()


@pytest.mark.parametrize("aborted", [0, 1])
def test_who_shares_a_load_does_not_lose_it_by_the_others_abort(bench: Bench, aborted: int) -> None:
    bench.store(LONG)
    ids = [bench.add(LONG), bench.add(LONG)]
    bench.step(2)
    bench.engine.abort(ids[aborted])
    bench.step(2)
    assert bench.engine.num_parked == 1
    bench.worker.release()
    bench.run()
    output = bench.outputs[ids[1 - aborted]]
    assert output.num_fetched_tokens >= 2 * GRID and output.token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_a_load_that_nobody_waits_for_serves_who_comes_next(bench: Bench) -> None:
    bench.store(LONG)
    first = bench.add(LONG)
    bench.step()
    bench.engine.abort(first)
    second = bench.add(LONG)
    bench.step(2)
    assert bench.engine.num_parked == 1 and len(bench.worker.loads) == 1
    bench.worker.release()
    bench.run()
    assert len(bench.connector.metadata_with_loads) == 1
    assert bench.outputs[second].num_fetched_tokens >= 2 * GRID and bench.outputs[second].token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_parked_and_running_requests_are_at_most_max_num_seqs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never, options={"max_num_seqs": 2})
    bench.store(LONG, OTHER, THIRD)
    ids = [bench.add(one) for one in (LONG, OTHER, THIRD)]
    bench.step(3)
    assert bench.engine.num_parked == 2 and len(bench.worker.loads) == 2 and len(bench.engine.scheduler.waiting) == 1
    bench.worker.pace = a_copy_a_poll
    while bench.engine.has_work:
        bench.step()
        assert len(bench.engine.scheduler.running) + bench.engine.num_parked <= 2
    bench.worker.release()
    assert [bench.outputs[one].token_ids for one in ids] == answers(name, [LONG, OTHER, THIRD])
    assert all(bench.outputs[one].num_fetched_tokens >= GRID for one in ids)
    bench.check()


def test_requests_run_in_order_of_arrival_though_their_loads_end_in_another(bench: Bench) -> None:
    bench.store(LONG, OTHER)
    ids = [bench.add(one) for one in (LONG, OTHER)]
    bench.step()
    first, second = bench.worker.loads
    bench.worker.advance(second)
    bench.step(2)
    bench.worker.advance(first)
    bench.step()
    assert [request.request_id for request in bench.engine.scheduler.running] == ids
    bench.worker.release()
    bench.run()
    assert [bench.outputs[one].token_ids for one in ids] == answers(bench.name, [LONG, OTHER])
    bench.check()


def test_what_others_compute_is_not_fetched(bench: Bench) -> None:
    """A load has come, and is evicted before its request runs; meanwhile somebody computes the same."""
    bench.store(LONG)
    late = bench.add(LONG)
    bench.step()
    bench.worker.advance(bench.worker.loads[0])
    bench.engine._take_completions()
    scheduler = bench.engine.scheduler
    request = scheduler.waiting.popleft()
    assert request.request_id == late and request.prefix.brought
    evict_all(bench.llm)
    bench.connector.drop([*bench.connector.index])
    bench.worker.release()
    bench.add(LONG)
    bench.run()
    scheduler.waiting.append(request)
    bench.run()
    assert bench.outputs[late].num_cached_tokens >= 2 * GRID and bench.outputs[late].num_fetched_tokens == 0
    bench.check()


# Those who go on without.


def test_a_load_that_hangs_is_not_waited_for_longer_than_allowed(bench: Bench) -> None:
    now = [0.0]
    set_clock(bench, now)
    bench.store(LONG)
    first = bench.add(LONG)
    bench.step(3)
    now[0] = 29.0
    second = bench.add(LONG)
    bench.step(2)
    assert bench.engine.num_parked == 2
    now[0] = 30.5
    bench.step(40)
    assert [bench.outputs[one].token_ids for one in (first, second)] == answers(bench.name, [LONG]) * 2
    assert [bench.outputs[one].num_fetched_tokens for one in (first, second)] == [0, 0]
    [flight] = bench.worker.loads
    ledger = bench.engine.pool.ledger
    assert all(ledger.page_class(page) == "leased" for page in flight.transfer.pages), "what hangs may still write"
    bench.worker.release()
    bench.check()


def test_the_time_allowed_is_the_option_s(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = Bench("llama", monkeypatch, options={"offload_timeout_s": 2.5}).engine.scheduler.offloader
    assert offloader is not None and offloader.timeout_s == 2.5


def test_blobs_that_went_since_the_lookup_are_computed(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.release()
    bench.connector.takes = lambda transfer, span: span is not None
    output = bench.serve(LONG)
    assert output.num_fetched_tokens == output.num_cached_tokens == 0
    assert output.token_ids == answers(bench.name, [LONG])[0] and not bench.connector.metadata_with_loads
    bench.check()


def test_a_load_that_fails_is_not_tried_again_by_the_same_request(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.release()
    bench.worker.outcome = loads_fail
    output = bench.serve(LONG)
    assert output.token_ids == answers(bench.name, [LONG])[0] and output.num_fetched_tokens == 0
    assert len(bench.connector.metadata_with_loads) == 1
    bench.check()


def test_a_store_that_fails_leaves_what_is_in_the_pool(bench: Bench) -> None:
    bench.worker.release()
    bench.worker.outcome = stores_fail
    assert bench.serve(LONG).token_ids == answers(bench.name, [LONG])[0]
    assert not bench.connector.index
    assert bench.serve(LONG).num_cached_tokens >= 2 * GRID
    evict_all(bench.llm)
    output = bench.serve(LONG)
    assert output.num_cached_tokens == 0 and output.token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_a_preempted_request_fetches_what_it_lost(bench: Bench) -> None:
    request = bench.add(LONG, max_tokens=30)
    bench.worker.pace = after_polls(1)
    bench.step(15)
    bench.engine.scheduler.preempt_latest()
    bench.step(0)
    for _ in range(20):
        bench.engine._step_transfers()
    evict_all(bench.llm)
    bench.run()
    output = bench.outputs[request]
    assert output.token_ids == answers(bench.name, [LONG], 30)[0] and output.num_preemptions == 1
    stats = bench.engine.prefix_stats
    # Of the prompt, as it was first admitted, nothing was: metrics count it among the tokens that were looked up.
    assert stats.num_resumed >= 2 * GRID and stats.num_fetched == output.num_fetched_tokens == 0
    bench.check()


def test_prompts_that_are_scored_fetch_nothing(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.release()
    [output] = bench.llm.generate([LONG], greedy(4).__class__(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1))
    assert output.num_fetched_tokens == 0 and not bench.connector.metadata_with_loads
    bench.check()


# Completions and generations.


def test_a_completion_counts_once_and_an_unknown_one_not_at_all(bench: Bench) -> None:
    bench.worker.release()
    bench.connector.tells_twice = True
    bench.store(LONG)
    output = bench.serve(LONG)
    assert output.token_ids == answers(bench.name, [LONG])[0] and output.num_fetched_tokens >= 2 * GRID
    bench.check()


def test_control_a_generation_that_is_used_again_shows(bench: Bench) -> None:
    bench.worker.release()
    assert bench.engine.scheduler.offloader is not None
    bench.monkeypatch.setattr(bench.engine.scheduler.offloader, "_generations", iter([1] * 1000))
    with pytest.raises(AssertionError, match="generation 1 is used again"):
        bench.serve(LONG, 12)
