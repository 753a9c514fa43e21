"""A transfer that never ends: it is waited for once and not long, its pages stay leased, nothing else is begun behind it, and a log line says so."""

import pytest

from atoll.engine.offloader import Offloader
from tests.offload.cases import GRID, Bench, answers, prompt
from tests.offload.paces import never

LONG = prompt(150)
OTHER = prompt(140, seed=201)


@pytest.fixture(params=["llama", "qwen3_5"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(name, monkeypatch, never)
    set_timeout(made, 0.05)
    return made


def set_timeout(bench: Bench, timeout_s: float) -> None:
    assert bench.engine.scheduler.offloader is not None
    bench.engine.scheduler.offloader.timeout_s = timeout_s


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_call_whose_stores_hang_returns_and_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert bench.serve(LONG).token_ids == answers(bench.name, [LONG])[0]
    hung = [page for flight in bench.worker.stores for page in flight.transfer.pages]
    [warning] = warnings(caplog)
    assert "in flight, the oldest for more than 0.1 s (--offload-timeout-s)" in warning
    ledger = bench.engine.pool.ledger
    assert all(ledger.ref_count(page) for page in hung) and not set(hung) & set(ledger._free), "what hangs may still read"
    bench.engine.check()


def test_what_hangs_is_not_waited_for_again_and_nothing_begins_behind_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench.serve(LONG)
    flights = [*bench.worker.flights]
    num_waits = bench.worker.num_waits
    for _ in range(2):
        assert bench.serve(OTHER).token_ids == answers(bench.name, [OTHER])[0]
        assert not bench.engine.drain_transfers()
    # A look at each end of a call, and at each drain.
    assert bench.worker.num_waits <= num_waits + 4
    assert bench.worker.flights == flights and not bench.connector.pending and len(warnings(caplog)) == 1
    bench.worker.release()
    assert bench.engine.drain_transfers() and not bench.engine.has_pending_transfers
    assert "have ended" in caplog.records[-1].getMessage()
    # And all as before.
    set_timeout(bench, 30.0)
    assert bench.serve(OTHER).num_cached_tokens >= 2 * GRID
    assert len(bench.connector.index) > sum(len(flight.transfer.spans) for flight in flights)
    bench.check()


def test_control_each_call_waits_for_stores_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader, "is_stuck", False)
    bench.serve(LONG)
    num_flights, num_waits = len(bench.worker.flights), bench.worker.num_waits
    bench.serve(OTHER)
    assert len(bench.worker.flights) > num_flights and bench.worker.num_waits > num_waits + 4
    bench.worker.release()
    bench.check()


def test_a_load_that_hangs_is_told_and_others_compute_at_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    set_timeout(bench, 30.0)
    bench.store(LONG, OTHER)
    set_timeout(bench, 0.05)
    outputs = [bench.serve(one) for one in (LONG, OTHER)]
    assert [output.token_ids for output in outputs] == answers(bench.name, [LONG, OTHER])
    assert len(bench.worker.loads) == 1 and not any(output.num_fetched_tokens for output in outputs)
    assert len(warnings(caplog)) == 1
    bench.worker.release()
    assert bench.engine.drain_transfers()
    bench.check()


def test_the_engine_closes_without_waiting_for_what_hangs(bench: Bench) -> None:
    bench.serve(LONG)
    num_waits = bench.worker.num_waits
    bench.llm.close()
    assert bench.worker.is_closed and bench.worker.num_waits == num_waits
