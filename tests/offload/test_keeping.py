"""What is kept beyond the pool and what is not: nothing of a bad request, nothing under another salt; and transfers when no request is left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.engine.step import Step
from atoll.errors import ConfigError, RequestError
from atoll.offload.base import BlobKind
from atoll.offload.base_worker import Fence
from tests.offload.cases import GRID, Bench, answers, evict_all, greedy, prompt
from tests.offload.paces import a_copy_a_poll, after_polls, never

LONG = prompt(150)


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(name, monkeypatch, never)


# What is wrong is kept nowhere.


def poison_one(bench: Bench, request_id: int) -> None:
    """A page of the request's own rows."""
    bench.engine.pool.poison([bench.engine._generations[request_id].request.pages[1]], "nan")


@pytest.mark.parametrize("pace", [after_polls(1), never], ids=["stored", "on its way"])
def test_the_pages_of_a_request_with_nan_are_forgotten(name: str, pace: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, pace)
    request = bench.add(LONG)
    bench.step(3)
    poison_one(bench, request)
    bench.step(2)
    assert bench.outputs[request].finish_reason == "error"
    again = bench.add(LONG)
    bench.run()
    output = bench.outputs[again]
    assert output.finish_reason == "length" and output.token_ids == answers(name, [LONG])[0]
    assert output.num_cached_tokens == 0 and not bench.connector.metadata_with_loads
    bench.worker.release()
    bench.check()
    # What the second one computed is stored, unless the first one's stores of the same names were still on their way; then it is missed, and no more.
    output = bench.serve(LONG)
    assert output.token_ids == answers(name, [LONG])[0]
    assert output.num_fetched_tokens >= 2 * GRID or pace is never
    bench.check()


def test_a_blob_of_nan_costs_those_who_fetch_it_and_nobody_after_them(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.release()
    for key, blob in bench.worker.blobs.items():
        bench.worker.blobs[key] = tuple(torch.full_like(page, 0xFF) for page in blob)
    outputs = bench.llm.generate([LONG, LONG], greedy())
    assert [output.finish_reason for output in outputs] == ["error"] * 2
    bench.engine.check()
    for _ in range(2):
        output = bench.serve(LONG)
        assert output.token_ids == answers(bench.name, [LONG])[0]
    assert output.num_cached_tokens >= 2 * GRID
    bench.check()


# No request at all.


def test_stores_go_on_when_no_request_is_left(bench: Bench) -> None:
    bench.add(LONG)
    bench.run()
    engine = bench.engine
    assert not engine.has_work and engine.has_pending_transfers and bench.worker.stores
    assert engine.step() == [] and engine.has_pending_transfers
    bench.worker.release()
    assert engine.drain_transfers() and not engine.has_pending_transfers
    bench.check()


def test_a_reset_is_refused_while_a_transfer_hangs(bench: Bench) -> None:
    bench.add(LONG)
    bench.run()
    bench.monkeypatch.setattr(bench.engine, "drain_transfers", lambda timeout_s=0.0: False)
    with pytest.raises(RequestError, match="transfers"):
        bench.engine.reset_prefix_cache()
    bench.engine.check()
    bench.monkeypatch.undo()
    bench.worker.release()
    assert bench.engine.drain_transfers()
    bench.engine.reset_prefix_cache()
    bench.engine.pool.check(held=())


def test_a_drain_that_takes_too_long_says_so(bench: Bench) -> None:
    bench.add(LONG)
    bench.run()
    assert not bench.engine.drain_transfers(timeout_s=0.01)
    bench.worker.release()
    assert bench.engine.drain_transfers() and not bench.engine.has_pending_transfers
    bench.check()


def test_clears_do_not_wait_for_a_request(bench: Bench) -> None:
    """Steps for transfers alone carry them too."""
    bench.add(LONG)
    bench.run()
    evict_all(bench.llm)
    guard = bench.engine.guard
    assert guard is not None and guard.num_pending
    bench.engine.step()
    assert not guard.num_pending
    bench.worker.release()
    bench.check()


def test_a_call_ends_when_its_transfers_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, a_copy_a_poll)
    bench.serve(LONG)
    assert not bench.engine.has_pending_transfers and not bench.worker.flights
    bench.check()


def test_closing_ends_requests_and_the_worker(bench: Bench) -> None:
    bench.worker.pace = a_copy_a_poll
    with bench.llm:
        bench.add(LONG)
        bench.step(3)
    assert bench.worker.is_closed and not bench.engine.has_work and not bench.connector.known


def test_closing_again_does_not_wait_for_what_was_given_up(bench: Bench) -> None:
    with bench.llm:
        bench.add(LONG)
        bench.step(3)
        bench.llm.close(timeout_s=0.0)
        assert bench.engine.has_pending_transfers
        num_steps = len(bench.connector.metadata)
    assert len(bench.connector.metadata) == num_steps


def test_a_reset_forgets_the_blobs_too(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.release()
    bench.llm.reset_prefix_cache()
    output = bench.serve(LONG)
    assert output.num_cached_tokens == 0 and output.token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_salts_never_meet(bench: Bench) -> None:
    bench.worker.release()
    for salt in (None, "a", "b"):
        assert bench.serve(LONG, salt=salt).num_cached_tokens == 0
        evict_all(bench.llm)
    for salt in ("a", "b", None):
        output = bench.serve(LONG, salt=salt)
        assert output.num_fetched_tokens >= 2 * GRID and output.token_ids == answers(bench.name, [LONG])[0]
    assert bench.serve(LONG, salt="c").num_cached_tokens == 0
    bench.check()


def test_bytes_that_came_back_are_those_that_left(bench: Bench) -> None:
    bench.worker.release()
    before: dict[Any, torch.Tensor] = {}
    bench.serve(LONG)
    for node in bench.engine.scheduler.cache._tree:
        before[BlobKind.KV, node.digest] = bench.engine.pool.buffer[node.page].clone()
    evict_all(bench.llm)
    bench.serve(LONG)
    loaded = bench.connector.metadata_with_loads[-1].loads[0].spans
    for span in loaded:
        if span.kind is BlobKind.KV:
            assert torch.equal(bench.engine.pool.buffer[span.pages[0]], before[span.kind, span.digest])
    assert len(loaded) >= 8
    bench.check()


# What ends a step in the middle, and engines that reuse nothing.


def test_an_exception_in_the_forward_pass_loses_no_page(bench: Bench) -> None:
    bench.store(LONG)
    bench.worker.pace = a_copy_a_poll
    ids = [bench.add(LONG), bench.add(prompt(140, seed=201))]
    bench.step(2)
    run_rows = bench.engine.runner._run_rows

    def fails(step: Step) -> Any:
        raise RuntimeError("out of memory")

    bench.monkeypatch.setattr(bench.engine.runner, "_run_rows", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.run()
    bench.monkeypatch.setattr(bench.engine.runner, "_run_rows", run_rows)
    bench.engine.abort_all()
    assert not bench.outputs and ids
    bench.check()
    assert bench.serve(LONG).token_ids == answers(bench.name, [LONG])[0]
    bench.check()


def test_transfers_that_were_to_start_behind_the_forward_pass_start_though_it_fails(bench: Bench) -> None:
    """As on a GPU, where it has been issued before them."""
    bench.worker.pace = a_copy_a_poll
    bench.add(LONG)
    bench.step()
    assert bench.connector.pending and not bench.worker.flights
    runner = bench.engine.runner

    def fails(step: Step) -> Any:
        assert not bench.worker.flights
        raise KeyboardInterrupt

    with bench.monkeypatch.context() as patch:
        patch.setattr(type(runner), "device", property(lambda self: torch.device("cuda")))
        patch.setattr("atoll.engine.runner.record_fence", lambda number, device: Fence(number))
        patch.setattr(runner, "_run_rows", fails)
        with pytest.raises(KeyboardInterrupt):
            bench.engine.step()
    bench.engine.abort_all()
    assert bench.engine.drain_transfers(timeout_s=1.0)
    bench.check()


def test_an_engine_that_reuses_nothing_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("llama", monkeypatch, options={"prefix_caching": False})
    for _ in range(2):
        assert bench.serve(LONG).token_ids == answers("llama", [LONG])[0]
    assert not bench.connector.metadata and not bench.engine.has_pending_transfers
    bench.engine.pool.check(held=())


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"state_checkpoint_interval_tokens": 0}, {"num_pages": 17}])
def test_a_hybrid_that_keeps_no_state_is_refused(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="offload is given and no state is kept, without which no prefix of this model can be fetched; give more pages"):
        Bench("qwen3_5", monkeypatch, options=options)
