"""The seven lines of the connector contract (`atoll.offload.base`), each held by a slow stream, and each seen broken as soon as its protection is gone."""

from collections.abc import Callable

import pytest
import torch

from atoll import RequestOutput
from atoll.kv.guard import ReleaseGuard
from atoll.offload.base import BlobKind, Completion, Metadata
from atoll.offload.base_worker import Fence, Offload, Regions
from atoll.offload.ranks import RankReports
from tests.offload.cases import GRID, PAGE, Bench, answers, evict_all, prompt
from tests.offload.paces import a_copy_a_poll, after_polls, backwards, half_of_each_load, never, states_fail
from tests.offload.recorder import Recorder
from tests.offload.slow import SlowWorker

MODELS = ["llama", "qwen3_5"]
LONG = prompt(150)
OTHER = prompt(140, seed=201)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def reach(name: str, length: int = len(LONG)) -> int:
    """Tokens of a prompt that can be reused: one is always computed."""
    unit = PAGE if name == "llama" else GRID
    return (length - 1) // unit * unit


def last(events: list[tuple[str, int]], event: tuple[str, int], before: int) -> int:
    """Where an event happened last before a place; -1: nowhere."""
    return max((place for place in range(before) if events[place] == event), default=-1)


# 1. A store reads only what is written.


def test_a_store_reads_behind_the_fence_of_the_step_after_the_one_that_wrote(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, after_polls(3))
    bench.serve(LONG)
    events = bench.recorder.events
    stores = [(place, page) for place, (kind, page) in enumerate(events) if kind == "store"]
    assert len(stores) >= len(LONG) // PAGE
    for place, page in stores:
        wrote = max(last(events, (kind, page), place) for kind in ("write", "save"))
        assert wrote >= 0 and any(kind == "fence" for kind, _ in events[wrote:place])
    evict_all(bench.llm)
    again = bench.serve(LONG)
    assert again.token_ids == answers(name, [LONG])[0]
    assert again.num_fetched_tokens == reach(name)
    bench.check()


def test_control_a_store_that_reads_before_the_fence_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.worker.reads_stale = True
    bench.store(LONG)
    assert bench.serve(LONG).token_ids != answers(name, [LONG])[0]


# 2. A load starts behind the fence.


def fetch_into_dirty_pages(bench: Bench) -> list[int]:
    """Every page that a load may get has been released by others, and is to be cleared."""
    bench.store(LONG)
    bench.recorder.events.clear()
    return bench.serve(LONG).token_ids


@pytest.mark.parametrize("pace", [after_polls(1), after_polls(4), backwards], ids=["soon", "late", "backwards"])
def test_a_load_starts_behind_the_clears_of_its_pages(name: str, pace: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, pace)
    assert fetch_into_dirty_pages(bench) == answers(name, [LONG])[0]
    events = bench.recorder.events
    loads = [(place, page) for place, (kind, page) in enumerate(events) if kind == "load"]
    assert len(loads) >= reach(name) // PAGE
    for place, page in loads:
        cleared = last(events, ("clear", page), place)
        assert cleared >= 0 and any(kind == "fence" for kind, _ in events[cleared:place])
    bench.check()


def test_control_a_load_ahead_of_the_fence_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.connector.starts_at_once = True
    assert fetch_into_dirty_pages(bench) != answers(name, [LONG])[0]
    assert any("ahead of the fence" in fault for fault in bench.recorder.faults)


# 3. A completion is visible only after the device event.


def test_nothing_is_read_before_its_load_was_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, never)
    bench.store(LONG)
    bench.recorder.events.clear()
    bench.add(LONG)
    bench.step(3)
    [flight] = bench.worker.loads
    bench.worker.advance(flight, 2)
    bench.step(3)
    assert bench.engine.num_parked == 1
    bench.worker.advance(flight)
    bench.step()
    assert bench.engine.num_parked == 0
    bench.worker.release()
    bench.run()
    events = bench.recorder.events
    for page in flight.transfer.pages:
        used = [place for place, (kind, touched) in enumerate(events) if kind in ("read", "restore") and touched == page]
        assert used and used[0] > events.index(("told", flight.generation)) > last(events, ("load", page), len(events))
    assert [output.token_ids for output in bench.outputs.values()] == answers(name, [LONG])
    bench.check()


def test_control_a_completion_that_is_told_early_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.store(LONG)
    bench.worker.pace, bench.worker.tells_early = after_polls(4), True
    assert bench.serve(LONG).token_ids != answers(name, [LONG])[0]
    assert any("before its copies" in fault for fault in bench.recorder.faults)


# 4. A page in flight is leased.


def abort_a_load_under_another(bench: Bench) -> list[int]:
    """A parked request is aborted, another one takes all the pages that it can get, and then the load goes on."""
    bench.store(LONG)
    bench.worker.pace = never
    aborted = bench.add(LONG)
    bench.step()
    [flight] = bench.worker.loads
    bench.worker.advance(flight, 1)
    bench.engine.abort(aborted)
    bench.engine.check()
    kept = bench.add(OTHER, 12)
    bench.step(3)
    bench.worker.advance(flight)
    bench.worker.release()
    bench.run()
    return bench.outputs[kept].token_ids


def test_the_target_of_an_aborted_load_stays_leased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    assert abort_a_load_under_another(bench) == answers(name, [OTHER], 12)[0]
    bench.check()


def test_control_a_target_that_an_abort_frees_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.connector.cancels_in_flight = True
    assert abort_a_load_under_another(bench) != answers(name, [OTHER], 12)[0]
    assert any("while it is loaded" in fault for fault in bench.recorder.faults)


def finish_under_a_store(bench: Bench) -> list[int]:
    """A request ends before anything of it is stored, and whatever is free is overwritten; then its stores read."""
    bench.worker.pace = never
    bench.add(LONG)
    bench.run()
    assert bench.worker.stores
    evict_all(bench.llm)
    bench.step(2)
    bench.worker.release()
    assert bench.engine.drain_transfers()
    evict_all(bench.llm)
    return bench.serve(LONG).token_ids


def test_what_a_store_reads_stays_leased_when_its_request_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    assert finish_under_a_store(bench) == answers(name, [LONG])[0]
    assert bench.engine.prefix_stats.num_fetched == reach(name)
    bench.check()


def test_control_a_source_that_its_requests_end_frees_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.connector.forgets_leases = True
    assert finish_under_a_store(bench) != answers(name, [LONG])[0]
    assert any("while it is stored" in fault for fault in bench.recorder.faults)


# 5. Clears ride on the first metadata that can start a load, batch or no batch.


@pytest.mark.parametrize("with_rows", [False, True], ids=["alone", "beside another"])
def test_the_metadata_of_a_load_carries_every_clear(name: str, with_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, after_polls(2))
    bench.store(LONG)
    if with_rows:
        bench.add(OTHER, max_tokens=30)
        bench.step(2)
        bench.engine.pool.poison(bench.engine.pool.ledger._free, "nan")
        assert bench.engine.guard is not None
        for page in bench.engine.pool.ledger._free:
            bench.engine.guard.released(page)
    ids = {bench.add(LONG): LONG}
    num_steps = bench.engine.num_steps
    bench.step()
    assert bench.engine.num_parked == 1
    assert bench.engine.num_steps == num_steps + with_rows, "a step has rows where another request runs, and none else"
    metadata = bench.connector.metadata[-1]
    [load] = metadata.loads
    assert set(load.pages) <= set(metadata.clears)
    bench.run()
    assert [bench.outputs[request_id].token_ids for request_id in ids] == answers(name, [LONG])
    bench.check()


def test_control_clears_behind_the_load_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, after_polls(2))
    bench.store(LONG)
    bench.connector.clears_late = True
    bench.recorder.events.clear()
    assert bench.serve(LONG).token_ids != answers(name, [LONG])[0]


def test_control_clears_that_ride_on_the_next_metadata_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = ReleaseGuard.take
    late: list[int] = []

    def previous(self: ReleaseGuard) -> list[int]:
        pages, late[:] = late[:], take(self)
        return pages

    bench = Bench(name, monkeypatch, a_copy_a_poll)
    bench.store(LONG)
    monkeypatch.setattr(ReleaseGuard, "take", previous)
    assert bench.serve(LONG).token_ids != answers(name, [LONG])[0]
    assert any("clear of page" in fault for fault in bench.recorder.faults)


# 6. A failed state is a shorter prefix.


def test_a_failed_state_leaves_the_last_boundary_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    bench.store(LONG)
    assert bench.serve(LONG[: GRID + 5], max_tokens=1).num_fetched_tokens in (0, GRID)
    bench.worker.outcome = states_fail
    output = bench.serve(LONG)
    assert output.token_ids == answers("qwen3_5", [LONG])[0]
    assert (output.num_cached_tokens, output.num_fetched_tokens) == (GRID, 0)
    [load] = bench.connector.metadata_with_loads[-1].loads
    assert {span.kind for span in load.spans} == {BlobKind.KV, BlobKind.STATE}
    bench.check()


def test_half_a_load_leaves_its_first_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.store(LONG)
    bench.worker.outcome = half_of_each_load
    output = bench.serve(LONG)
    assert output.token_ids == answers(name, [LONG])[0]
    # 9 pages and 8: the first 4 arrive, and for a hybrid no state is at their end that arrived.
    assert output.num_cached_tokens == output.num_fetched_tokens == (4 * PAGE if name == "llama" else 0)
    bench.check()


@pytest.mark.parametrize("outcome", [states_fail, half_of_each_load], ids=lambda outcome: outcome.__name__)
def test_control_a_failure_that_is_not_told_shows(outcome: Callable[..., list[bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    bench.store(LONG)
    bench.worker.outcome, bench.worker.tells_all_arrived = outcome, True
    assert bench.serve(LONG).token_ids != answers("qwen3_5", [LONG])[0]


# 7. Over ranks, one failure is everybody's miss.


class TwoRanks:
    """The engine's worker, and another that moves a second rank's part of every blob, in a pool of its own."""

    def __init__(self, bench: Bench) -> None:
        self.reports = RankReports(2)
        self.ranks = [bench.worker, SlowWorker(Recorder(), bench.worker.pace)]
        self.buffer = torch.randint(0, 256, bench.engine.pool.buffer.shape, dtype=torch.uint8)
        self.ranks[1].register(Regions(self.buffer, bench.engine.scheduler.cache.image_pages))
        bench.monkeypatch.setattr(bench.engine, "offload", Offload(bench.connector, self))
        bench.monkeypatch.setattr(bench.engine.runner, "worker", self)

    def register(self, regions: Regions) -> None:
        raise AssertionError("both are registered")

    def run(self, metadata: Metadata, fence: Fence) -> None:
        for is_load, transfers in ((True, metadata.loads), (False, metadata.stores)):
            for transfer in transfers:
                self.ranks[1].recorder.leased(transfer, is_load)
        for rank in self.ranks:
            rank.run(metadata, fence)

    def poll(self) -> list[Completion]:
        return [completion for number, rank in enumerate(self.ranks) for completion in self.reports.take(number, rank.poll())]

    def wait(self, timeout_s: float) -> None:
        self.ranks[0].wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        for rank in self.ranks:
            rank.close(timeout_s)

    def wrong_pages(self, bench: Bench) -> list[int]:
        """Pages that are in use here and hold something else there."""
        blobs, wrong = self.ranks[1].blobs, []
        for load in bench.connector.metadata_with_loads[-1].loads:
            for span in load.spans:
                node = bench.engine.scheduler.cache._tree.get(span.digest)
                if span.kind is BlobKind.KV and node is not None and node.page == span.pages[0]:
                    if not torch.equal(self.buffer[node.page], blobs[span.kind, span.digest][0]):
                        wrong.append(node.page)
        return wrong


def fetch_over_ranks(bench: Bench) -> tuple[TwoRanks, RequestOutput]:
    ranks = TwoRanks(bench)
    bench.store(LONG)
    ranks.buffer.zero_()
    ranks.ranks[1].outcome = half_of_each_load
    return ranks, bench.serve(LONG)


def test_what_fails_on_one_rank_is_missed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("llama", monkeypatch, after_polls(2))
    ranks, output = fetch_over_ranks(bench)
    assert output.token_ids == answers("llama", [LONG])[0]
    assert output.num_fetched_tokens == 4 * PAGE and not ranks.wrong_pages(bench)
    bench.check()


def test_control_a_rank_that_nobody_asks_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankReports, "take", lambda self, rank, completions: [*completions] if rank == 0 else [])
    bench = Bench("llama", monkeypatch, after_polls(2))
    ranks, output = fetch_over_ranks(bench)
    assert output.num_fetched_tokens > 4 * PAGE and ranks.wrong_pages(bench)
