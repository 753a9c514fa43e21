"""The tiers' scheduler side: what is found, what lies where, what is evicted, and that nothing in flight loses its slots."""

import pytest

from atoll.offload import BlobKind, Completion, Found, Transfer
from atoll.offload.connector import TieredConnector
from atoll.offload.lru import Tier
from atoll.offload.moves import MoveKind
from tests.offload.tier_kit import FakeWorker, digest, kv, make_connector, state, store, turn, values_of


def test_what_was_stored_is_found_and_comes_back() -> None:
    connector, worker = make_connector(8), FakeWorker()
    spans = [kv(1, 11), kv(2, 12), state(2, (13, 14, 15))]
    taken = store(connector, worker, 1, spans)
    assert taken is not None and taken.spans == tuple(spans) and len(taken.note) == 5
    assert connector.lookup([digest(1), digest(2), digest(3)], 0) == Found(2, frozenset({2}))
    assert connector.lookup([digest(1), digest(2), digest(3)], 1) == Found(1, frozenset({2}))
    load = Transfer(2, (kv(1, 21), kv(2, 22), state(2, (23, 24, 25))))
    assert connector.after_allocation(load)
    (told,) = turn(connector, worker)
    assert told.generation == 2 and told.arrived == (True,) * 3 and told.error is None
    assert [worker.pool[page] for page in range(21, 26)] == [value for span in spans for value in values_of(span)]
    assert connector.stats.loaded_bytes == connector.stats.stored_bytes == 5 * 64


def test_nothing_is_found_before_its_store_has_ended() -> None:
    connector, worker = make_connector(4), FakeWorker()
    assert connector.prepare_store(Transfer(1, (kv(1, 11),))) is not None
    assert connector.lookup([digest(1)], 0) == Found()
    worker.run(connector.build_metadata(0, ()))
    assert connector.lookup([digest(1)], 0) == Found()
    assert not connector.after_allocation(Transfer(2, (kv(1, 12),)))
    assert connector.request_finished([digest(1)], [1])
    assert [done.generation for done in connector.complete(worker.finish_all())] == [1]
    assert not connector.request_finished([digest(1)], [1])
    assert connector.lookup([digest(1)], 0) == Found(1)


def test_a_blob_is_taken_once() -> None:
    connector, worker = make_connector(4), FakeWorker()
    assert connector.prepare_store(Transfer(1, (kv(1, 11),))) is not None
    # On its way, then there.
    assert connector.prepare_store(Transfer(2, (kv(1, 12),))) is None
    turn(connector, worker)
    taken = connector.prepare_store(Transfer(3, (kv(1, 12), kv(2, 13))))
    assert taken is not None and taken.spans == (kv(2, 13),)


def test_the_least_recently_used_goes_first_and_a_prefix_outlives_what_follows_it() -> None:
    connector, worker = make_connector(4), FakeWorker()
    for number in (1, 2, 3, 9):
        store(connector, worker, number, [kv(number, 10 + number)])
    connector.request_finished([digest(1), digest(2), digest(3)], [])
    store(connector, worker, 20, [kv(20, 20)])
    assert connector.lookup([digest(9)], 0) == Found()
    store(connector, worker, 21, [kv(21, 21)])
    # The chain's deepest page went, its beginning is there.
    assert [connector.lookup([digest(n)], 0).num_pages for n in (1, 2, 3)] == [1, 1, 0]
    assert connector.stats.tiers[0].num_evicted == 2


def test_a_state_is_there_whole_or_not_at_all() -> None:
    connector, worker = make_connector(4), FakeWorker()
    store(connector, worker, 1, [state(1, (11, 12, 13))])
    # Of use to whoever has the page before it.
    assert connector.lookup([digest(1)], 1) == Found(0, frozenset({1}))
    assert connector.lookup([digest(1)], 0) == Found()
    store(connector, worker, 2, [kv(2, 14), kv(3, 15)])
    assert connector.lookup([digest(1)], 1) == Found()
    assert connector.stats.tiers[0].used_bytes == 2 * 64


def test_what_is_in_flight_is_not_evicted() -> None:
    connector, worker = make_connector(2), FakeWorker()
    store(connector, worker, 1, [kv(1, 11), kv(2, 12)])
    assert connector.after_allocation(Transfer(2, (kv(1, 21), kv(2, 22))))
    assert connector.prepare_store(Transfer(3, (kv(3, 13),))) is None
    assert turn(connector, worker)[0].ok
    assert connector.prepare_store(Transfer(4, (kv(3, 13),))) is not None


def test_a_cancelled_transfer_that_has_not_begun_gives_everything_back() -> None:
    connector, worker = make_connector(2), FakeWorker()
    store(connector, worker, 1, [kv(1, 11)])
    assert connector.prepare_store(Transfer(2, (kv(2, 12),))) is not None
    assert connector.after_allocation(Transfer(3, (kv(1, 21),)))
    assert connector.cancel(2) and connector.cancel(3)
    connector.check()
    assert not connector.has_pending_work
    # Both slots are there again.
    assert connector.prepare_store(Transfer(4, (kv(5, 15), kv(6, 16)))) is not None


def test_a_cancelled_transfer_that_has_begun_still_ends() -> None:
    connector, worker = make_connector(2), FakeWorker()
    store(connector, worker, 1, [kv(1, 11)])
    assert connector.after_allocation(Transfer(3, (kv(1, 21),)))
    worker.run(connector.build_metadata(0, ()))
    assert not connector.cancel(3)
    assert connector.complete(worker.finish_all()) == [Completion(3, (True,), 0.25, 64)]


def test_clears_ride_on_every_metadata() -> None:
    connector = make_connector(2)
    metadata = connector.build_metadata(7, (3, 4))
    assert metadata.clears == (3, 4) and metadata.fence == 7 and not metadata.moves


def test_blobs_follow_to_the_disk_and_come_back_from_it() -> None:
    connector, worker = make_connector(8, 16), FakeWorker()
    spans = [kv(n, 10 + n) for n in (1, 2)]
    store(connector, worker, 1, spans)
    for n in (3, 5, 7, 9):
        store(connector, worker, n, [kv(n, 10 + n), kv(n + 1, 11 + n)])
    assert [key[1] for key in connector.host.keys] == [digest(n) for n in range(3, 11)]
    # Evicted from the host tier, found on the disk; nothing is stored twice.
    assert connector.lookup([digest(1), digest(2)], 0) == Found(2)
    assert connector.prepare_store(Transfer(3, (kv(1, 11),))) is None
    assert connector.after_allocation(Transfer(4, (kv(1, 21), kv(2, 22))))
    metadata = connector.build_metadata(0, ())
    assert not metadata.loads and [move.kind for move in metadata.note] == [MoveKind.READ] * 2
    worker.run(metadata)
    assert connector.complete(worker.finish()) == []
    assert not connector.build_metadata(1, ()).moves
    assert connector.complete(worker.finish()) == []
    worker.run(connector.build_metadata(2, ()))
    assert [done.arrived for done in connector.complete(worker.finish_all())] == [(True, True)]
    assert [worker.pool[21], worker.pool[22]] == [values_of(span)[0] for span in spans]


def test_a_slow_disk_holds_a_quarter_of_the_host_tier_and_gets_the_rest_later() -> None:
    connector, worker = make_connector(8, 16), FakeWorker()
    connector.prepare_store(Transfer(1, tuple(kv(n, 10 + n) for n in range(1, 9))))
    worker.run(connector.build_metadata(0, ()))
    connector.complete(worker.finish_all())
    worker.run(connector.build_metadata(1, ()))
    assert [name for name, _ in worker.in_flight] == ["write"] * 2
    # Six are free for what comes meanwhile; of those that have to leave for it nothing is written.
    taken = connector.prepare_store(Transfer(2, tuple(kv(n, n) for n in range(21, 29))))
    assert taken is not None and len(taken.spans) == 6
    turn(connector, worker)
    assert connector.disk is not None
    assert {int.from_bytes(name) for _, name in connector.disk.keys} == {1, 2, *range(21, 27)}


def test_a_disk_that_never_writes_costs_no_memory() -> None:
    connector, worker = make_connector(8, 1000), FakeWorker()
    for number in range(1, 200):
        assert connector.prepare_store(Transfer(number, (kv(number, number),))) is not None
        worker.run(connector.build_metadata(0, ()))
        connector.complete([done for i in reversed(range(len(worker.in_flight))) if worker.in_flight[i][0] == "store" for done in worker.finish(i)])
        # The first that waits to be written stays in use.
        connector.lookup([digest(3)], 0)
    assert len(connector._unsaved) <= 2 * connector.host.num_slots
    # What is left is written when the disk does, the first that came first.
    turn(connector, worker)
    assert connector.disk is not None
    assert {int.from_bytes(name) for _, name in connector.disk.keys} == {1, 2, 3, *range(195, 200)}


def on_disk_alone(num_host: int) -> tuple[TieredConnector, FakeWorker]:
    """A chain of eight pages, with states after the second and the last, in front of which the host tier holds something else."""
    connector, worker = make_connector(num_host, 40), FakeWorker()
    for number in range(1, 9):
        store(connector, worker, number, [kv(number, number)])
    for number in (2, 8):
        store(connector, worker, 10 + number, [state(number, (11, 12, 13))])
    for number in range(30, 30 + num_host):
        store(connector, worker, number, [kv(number, number)])
    return connector, worker


@pytest.mark.parametrize(("num_host", "num_pages", "states"), [(4, 4, set()), (5, 5, {2}), (9, 8, {2}), (10, 8, {2}), (11, 8, {2, 8})])
def test_no_more_is_promised_of_the_disk_than_the_host_tier_can_hold(num_host: int, num_pages: int, states: set[int]) -> None:
    connector, worker = on_disk_alone(num_host)
    chain = [digest(number) for number in range(1, 9)]
    assert connector.lookup(chain, 0) == Found(num_pages, frozenset(states))
    assert connector.lookup(chain, 8).states == ({2, 8} if num_host >= 3 else set())
    reach = max(states, default=num_pages)
    load = Transfer(100, (*(kv(number, 20 + number) for number in range(1, reach + 1)), *([state(reach, (51, 52, 53))] if states else [])))
    assert connector.after_allocation(load)
    # What others hold is not there to be promised: another load of the same blobs is free.
    assert connector.lookup(chain, 0).num_pages >= reach
    (told,) = turn(connector, worker)
    assert told.ok


def test_control_a_promise_that_the_host_tier_cannot_hold_is_read_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = TieredConnector._slots_to_hold
    monkeypatch.setattr(TieredConnector, "_slots_to_hold", lambda self, key: None if needs(self, key) is None else 0)
    connector, worker = on_disk_alone(9)
    assert connector.lookup([digest(number) for number in range(1, 9)], 0) == Found(8, frozenset({2, 8}))
    assert connector.after_allocation(Transfer(100, (*(kv(number, 20 + number) for number in range(1, 9)), state(8, (51, 52, 53)))))
    (told,) = turn(connector, worker)
    # The state is there, the page before it not: of a hybrid nothing can be used.
    assert told.arrived == (*[True] * 6, False, False, True)


def test_two_loads_that_want_a_blob_from_the_disk_have_it_read_once() -> None:
    connector, worker = make_connector(1, 4), FakeWorker()
    store(connector, worker, 1, [kv(1, 11)])
    store(connector, worker, 2, [kv(2, 12)])
    assert connector.after_allocation(Transfer(3, (kv(1, 21),))) and connector.after_allocation(Transfer(4, (kv(1, 22),)))
    told = turn(connector, worker)
    assert sorted(done.generation for done in told) == [3, 4] and worker.pool[21] == worker.pool[22] == values_of(kv(1, 0))[0]
    # One load is given up while the read goes on.
    store(connector, worker, 5, [kv(2, 12)])
    assert connector.after_allocation(Transfer(6, (kv(2, 23),)))
    worker.run(connector.build_metadata(0, ()))
    assert connector.cancel(6)
    assert connector.has_pending_work and turn(connector, worker) == []
    assert connector.host.keys == [(BlobKind.KV, digest(2))]


def test_a_mapped_file_is_recorded_verified_once_and_voided_before_it_is_written() -> None:
    connector, worker = make_connector(2, is_mapped=True), FakeWorker()
    store(connector, worker, 1, [kv(1, 11), kv(2, 12)])
    assert len(worker.host_records) == 2
    again = Tier("host", 2, 64)
    for slot, name in worker.host_records.items():
        again.adopt((BlobKind(name[0]), name[1]), (slot,), is_verified=False)
    again.free_rest()
    connector = TieredConnector(again, is_mapped=True)
    assert connector.lookup([digest(1), digest(2)], 0) == Found(2)
    for generation in (2, 3):
        assert connector.after_allocation(Transfer(generation, (kv(1, 21),)))
        metadata = connector.build_metadata(0, ())
        assert [move.kind for move in metadata.note or ()] == ([MoveKind.VERIFY] if generation == 2 else [])
        worker.run(metadata)
        told = connector.complete(worker.finish_all()) + turn(connector, worker)
        assert [done.arrived for done in told] == [(True,)]
    # FakeWorker.run finds a slot that is written under a record.
    store(connector, worker, 4, [kv(3, 13), kv(4, 14)])
    assert {name[1] for name in worker.host_records.values()} == {digest(3), digest(4)}


def test_slots_written_under_a_record_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredConnector, "_void", lambda *_: None)
    connector, worker = make_connector(1, is_mapped=True), FakeWorker()
    store(connector, worker, 1, [kv(1, 11)])
    with pytest.raises(AssertionError, match="under a record"):
        store(connector, worker, 2, [kv(2, 12)])


@pytest.mark.parametrize("num_disk", [0, 4])
def test_forgotten_blobs_are_gone_from_every_tier_and_file(num_disk: int) -> None:
    connector, worker = make_connector(4, num_disk, is_mapped=True), FakeWorker()
    store(connector, worker, 1, [kv(1, 11), kv(2, 12)])
    assert connector.prepare_store(Transfer(2, (kv(3, 13),))) is not None
    worker.run(connector.build_metadata(0, ()))
    connector.forget([digest(1), digest(3)])
    assert [done.generation for done in turn(connector, worker)] == [2]
    assert [connector.lookup([digest(n)], 0).num_pages for n in (1, 2, 3)] == [0, 1, 0]
    left = {name[1] for records in (worker.host_records, worker.disk_records) for name in records.values()}
    assert left == {digest(2)}


@pytest.mark.parametrize("which", [MoveKind.RECORD, MoveKind.WRITE])
def test_what_is_forgotten_while_its_record_is_written_has_none(which: MoveKind) -> None:
    connector, worker = make_connector(8, 4, is_mapped=True), FakeWorker()
    worker.pool[11] = values_of(kv(1, 11))[0]
    connector.prepare_store(Transfer(1, (kv(1, 11),)))
    worker.run(connector.build_metadata(0, ()))
    connector.complete(worker.finish_all())
    worker.run(connector.build_metadata(1, ()))
    connector.forget([digest(1)])
    # The voids come first, the record's write after them.
    worker.run(connector.build_metadata(2, ()))
    index = next(i for i, (name, _) in enumerate(worker.in_flight) if name == which)
    connector.complete(worker.finish(index))
    turn(connector, worker)
    assert not worker.host_records and not worker.disk_records


def test_reset_forgets_what_is_not_in_flight() -> None:
    connector, worker = make_connector(8, 8, is_mapped=True), FakeWorker()
    store(connector, worker, 1, [kv(1, 11), kv(2, 12)])
    assert connector.after_allocation(Transfer(2, (kv(1, 21),)))
    connector.reset()
    assert turn(connector, worker)[0].ok
    assert [connector.lookup([digest(n)], 0).num_pages for n in (1, 2)] == [1, 0]


def test_reset_forgets_what_is_being_written_to_the_disk() -> None:
    connector, worker = make_connector(8, 8, is_mapped=True), FakeWorker()
    assert connector.prepare_store(Transfer(1, (kv(1, 11),)))
    worker.run(connector.build_metadata(1, ()))
    connector.complete(worker.finish())
    worker.run(connector.build_metadata(2, ()))
    assert {name for name, _ in worker.in_flight} == {"record", "write"}
    connector.reset()
    turn(connector, worker)
    assert connector.lookup([digest(1)], 0).num_pages == 0
    assert not worker.host_records and not worker.disk_records and not connector.has_pending_work
    connector.check()


def test_unknown_completions_are_ignored() -> None:
    connector, worker = make_connector(2), FakeWorker()
    assert connector.complete([Completion(5, (True,)), Completion(-5, (True,))]) == []
    store(connector, worker, 1, [kv(1, 11)])
    assert connector.after_allocation(Transfer(2, (kv(1, 21),)))
    # It has not been sent: nobody can have ended it.
    assert connector.complete([Completion(2, (True,))]) == []
    assert turn(connector, worker)[0].generation == 2
