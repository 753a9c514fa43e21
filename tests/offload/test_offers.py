"""What is offered again: blobs that a connector refused or gave up while their pages stay in the pool, once for each request that ends with them."""

import pytest

from atoll.engine.offloader import Offloader
from atoll.offload.base import BlobKind, Span, Transfer
from atoll.offload.connector import TieredConnector
from tests.offload.cases import GRID, Bench, answers, evict_all, prompt
from tests.offload.paces import after_polls
from tests.offload.tier_kit import FakeWorker, digest, kv, make_connector, state, store

LONG = prompt(150)


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def lose(bench: Bench, how: str) -> None:
    """A request has been served, is in the pool, and the connector has nothing of it."""
    if how == "refused":
        bench.connector.takes = lambda transfer, span: False
        bench.serve(LONG)
        bench.connector.takes = lambda transfer, span: True
    else:
        bench.serve(LONG)
        bench.connector.drop([*bench.connector.index])
    assert not bench.connector.index


def fetched_after_a_second_request(bench: Bench, how: str) -> int:
    lose(bench, how)
    assert bench.serve(LONG).num_cached_tokens >= 2 * GRID
    evict_all(bench.llm)
    output = bench.serve(LONG)
    assert output.token_ids == answers(bench.name, [LONG])[0]
    return output.num_fetched_tokens


@pytest.mark.parametrize("how", ["refused", "evicted"])
def test_what_a_request_reuses_is_offered_again_when_it_ends(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, after_polls(1))
    assert fetched_after_a_second_request(bench, how) >= 2 * GRID
    bench.worker.release()
    bench.check()


@pytest.mark.parametrize("how", ["refused", "evicted"])
def test_control_offered_once_it_is_lost_with_the_pool(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader, "note_all", lambda *_: None)
    bench = Bench(name, monkeypatch, after_polls(1))
    assert fetched_after_a_second_request(bench, how) < GRID
    bench.worker.release()
    bench.check()


def test_what_the_connector_has_is_not_stored_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    bench.serve(LONG)
    num_stores = bench.slow.counts()["store"]
    bench.serve(LONG)
    assert bench.slow.counts()["store"] == num_stores
    bench.check()


def test_a_preemption_offers_nothing_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are wanted by another at once, which would wait for the stores' lease."""
    bench = Bench(name, monkeypatch)
    request = bench.add(LONG, max_tokens=30)
    bench.step(8)
    bench.connector.drop([*bench.connector.index])
    bench.engine.scheduler.preempt_latest()
    assert not bench.connector.pending
    bench.run()
    assert bench.outputs[request].token_ids == answers(name, [LONG], 30)[0]
    bench.check()


def test_nothing_of_a_bad_request_is_offered_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch)
    lose(bench, "evicted")
    request = bench.engine._generations[bench.add(LONG)].request
    bench.step()
    bench.engine.scheduler.finish(request, discard=True)
    del bench.engine._generations[request.request_id]
    assert not bench.connector.pending and not bench.connector.index
    bench.check()


# A host tier that holds less than one chain.


def chain(num_pages: int, *states: int) -> Transfer:
    """As a request offers it at its end: each state behind its page."""
    spans: list[Span] = []
    for number in range(1, num_pages + 1):
        spans.append(kv(number, number))
        if number in states:
            spans.append(state(number, (100 + 10 * number + part for part in range(3))))
    return Transfer(1000, tuple(spans))


def digests(count: int) -> list[bytes]:
    return [digest(number) for number in range(1, count + 1)]


def offer_in_chunks(connector: TieredConnector, worker: FakeWorker) -> None:
    """As prefills of two pages do; each evicts what the ones before it have stored."""
    for first in (1, 3, 5, 7):
        store(connector, worker, first, [kv(first, first), kv(first + 1, first + 1)])


def test_the_end_of_a_chain_gives_way_to_its_beginning() -> None:
    connector, worker = make_connector(4), FakeWorker()
    offer_in_chunks(connector, worker)
    assert connector.lookup(digests(8), 0).num_pages == 0
    store(connector, worker, 20, chain(8).spans)
    assert connector.lookup(digests(8), 0).num_pages == 4
    # It stays so, however often it is offered.
    assert store(connector, worker, 21, chain(8).spans) is None
    assert connector.lookup(digests(8), 0).num_pages == 4


def test_other_chains_go_before_the_end_of_this_one() -> None:
    connector, worker = make_connector(6), FakeWorker()
    store(connector, worker, 1, [kv(3, 3), kv(4, 4)])
    store(connector, worker, 2, [kv(20 + number, 20 + number) for number in range(4)])
    store(connector, worker, 3, chain(4).spans)
    assert connector.lookup(digests(4), 0).num_pages == 4 and connector.stats.tiers[0].num_evicted == 2


def test_what_fits_of_a_chain_ends_with_a_state() -> None:
    connector, worker = make_connector(6), FakeWorker()
    taken = store(connector, worker, 1, chain(8, 2, 8).spans)
    assert taken is not None
    found = connector.lookup(digests(8), 0)
    assert found.num_pages == 3 and found.states == {2}


def test_a_whole_engine_offers_pages_in_order_and_states_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    lose(bench, "evicted")
    offered: list[Transfer] = []
    prepare = bench.connector.prepare_store
    monkeypatch.setattr(bench.connector, "prepare_store", lambda transfer: offered.append(transfer) or prepare(transfer))
    request = bench.engine._generations[bench.add(LONG)].request
    bench.run()
    spans = offered[-1].spans
    assert [span.digest for span in spans if span.kind is BlobKind.KV] == request.prefix.digests[:9]
    states = [number for number, span in enumerate(spans) if span.kind is BlobKind.STATE]
    assert states and all(spans[number].digest == spans[number - 1].digest for number in states)
    bench.check()
