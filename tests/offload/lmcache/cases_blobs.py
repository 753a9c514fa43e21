"""The connector against a real LMCache: what comes back is what was stored, or is a load that failed."""

import threading
from typing import Any

import pytest
import torch

from atoll.offload.base import BlobKind, Completion, Found, Transfer
from atoll.offload.base_worker import record_fence
from atoll.offload.lmcache_store import LMCacheStore
from tests.offload.lmcache.pool import KV, NUM_PAGES, PAGE_BYTES, STATE, Pools, digest, page, state

DEVICES = pytest.mark.parametrize("where", [pytest.param("cpu"), pytest.param("gpu", marks=pytest.mark.gpu)])
TIERS = pytest.mark.parametrize("disk_bytes", [pytest.param(0, id="memory"), pytest.param(2**24, id="disk")])


@DEVICES
@TIERS
def test_pages_and_states_come_back(pools: Pools, where: str, disk_bytes: int) -> None:
    """To other pages than they came from, the image's in another order; the kinds of one digest do not meet."""
    pool = pools.make(disk_bytes=disk_bytes)
    pool.fill(1, 1, 2, 5, 9, 7)
    before = pool.pages.clone()
    kept = pool.keep(page(1, 1), page(2, 2), state(2, 5, 9, 7))
    assert kept is not None and kept.ok and kept.num_bytes == 5 * PAGE_BYTES
    assert pool.connector.lookup([digest(n) for n in (1, 2, 3)], 0) == Found(2, frozenset({2}))
    assert pool.connector.lookup([digest(n) for n in (1, 2, 3)], 1) == Found(1, frozenset({2}))

    pool.pages.fill_(0xFF)
    fetched = pool.fetch(page(1, 30), page(2, 20), state(2, 40, 10, 11))
    assert fetched is not None and fetched.ok and fetched.num_bytes == 5 * PAGE_BYTES and fetched.error is None
    for source, target in ((1, 30), (2, 20), (5, 40), (9, 10), (7, 11)):
        assert torch.equal(pool.pages[target], before[source])
    written = {30, 20, 40, 10, 11}
    assert all(bool((pool.pages[at] == 0xFF).all()) for at in range(NUM_PAGES) if at not in written)
    assert not pool.connector.has_pending_work


@pytest.mark.parametrize("kept", [KV, STATE])
def test_one_kind_is_not_found_as_the_other(pools: Pools, kept: BlobKind) -> None:
    pool = pools.make()
    pool.fill(1, 1, 2, 3)
    assert pool.keep(page(1, 1) if kept is KV else state(1, 1, 2, 3)) is not None
    assert pool.connector.lookup([digest(1)], 0) == (Found(1) if kept is KV else Found(0, frozenset({1})))
    assert pool.fetch(state(1, 1, 2, 3) if kept is KV else page(1, 1)) is None


def test_control_one_namespace_mixes_the_kinds(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without namespaces a state's first page is given out as the page of its digest; the tests above see it."""
    named = LMCacheStore.key
    monkeypatch.setattr(LMCacheStore, "key", lambda store, kind, digest, epoch: named(store, KV, digest, epoch))
    pool = pools.make()
    pool.fill(1, 1, 2, 3, 4)
    before = pool.pages.clone()
    assert pool.keep(page(1, 1)) is not None and pool.keep(state(1, 2, 3, 4)) is not None
    fetched = pool.fetch(state(1, 10, 11, 12))
    # The page's bytes under the state's name: too few, so not even a whole image.
    assert fetched is not None and (not fetched.ok or not torch.equal(pool.pages[10:13], before[2:5]))


@DEVICES
def test_what_was_evicted_is_not_found_and_not_loaded(pools: Pools, where: str) -> None:
    """Memory for 16 pages: of 20, the first ones go; what a finished request used last stays."""
    pool = pools.make(cpu_bytes=16 * PAGE_BYTES)
    for number in range(16):
        pool.fill(number, 1)
        assert pool.keep(page(number, 1)) is not None
    assert not pool.connector.request_finished([digest(0), digest(1)], [])
    for number in range(16, 20):
        pool.fill(number, 1)
        assert pool.keep(page(number, 1)) is not None
    there = [number for number in range(20) if pool.connector.lookup([digest(number)], 0).num_pages]
    assert there == [0, 1, *range(6, 20)]
    assert pool.connector.stats.tiers[0].num_evicted == 4 and pool.connector.stats.tiers[0].num_blobs == 16
    # What is gone is taken again when it is offered again.
    assert pool.keep(page(0, 1)) is None and pool.keep(page(2, 1)) is not None


def test_eviction_before_the_load_is_taken_on_is_refused(pools: Pools) -> None:
    pool = pools.make(cpu_bytes=16 * PAGE_BYTES)
    assert pool.keep(page(0, 1)) is not None
    assert pool.connector.lookup([digest(0)], 0).num_pages == 1
    for number in range(1, 17):
        assert pool.keep(page(number, 1)) is not None
    assert pool.fetch(page(0, 2)) is None
    assert not pool.connector.has_pending_work


def test_eviction_under_a_load_is_a_load_that_failed(pools: Pools) -> None:
    """LMCache itself drops a blob after the load was taken on: the spans before it arrive, nothing is written for it, and it is not promised again."""
    pool = pools.make()
    pool.fill(3, 1, 2)
    assert pool.keep(page(1, 1), page(2, 2)) is not None
    pool.pages[10:20] = 0
    pool.generation += 1
    assert pool.connector.after_allocation(Transfer(pool.generation, (page(1, 10), page(2, 11))))
    pool.store._manager.remove(pool.store.key(KV, digest(2), 0))
    pool.step()
    fetched = pool.end(pool.generation)
    assert fetched.arrived == (True, False) and fetched.error is not None and "no more" in fetched.error
    assert torch.equal(pool.pages[10], pool.pages[1]) and not pool.pages[11].any()
    assert pool.connector.lookup([digest(1), digest(2)], 0).num_pages == 1
    assert pool.connector.stats.num_load_failures == 1
    # It is computed instead, and offered again.
    assert pool.keep(page(2, 2)) is not None
    assert pool.connector.lookup([digest(1), digest(2)], 0).num_pages == 2


def test_a_load_pins_what_it_will_read(pools: Pools) -> None:
    """Taken on, then outrun by more stores than fit: LMCache evicts others."""
    pool = pools.make(cpu_bytes=16 * PAGE_BYTES)
    pool.fill(5, 1)
    assert pool.keep(page(0, 1)) is not None
    pool.generation += 1
    load = pool.generation
    assert pool.connector.after_allocation(Transfer(load, (page(0, 9),)))
    waiting = pool.connector.build_metadata(load, ())
    for number in range(1, 33):
        kept = pool.keep(page(number, 2))
        assert kept is not None and kept.ok
    pool.worker.run(waiting, record_fence(load, pool.pages.device))
    assert pool.end(load).ok and torch.equal(pool.pages[9], pool.pages[1])
    # And lets go of it.
    for number in range(40, 56):
        assert pool.keep(page(number, 2)) is not None
    assert pool.connector.lookup([digest(0)], 0).num_pages == 0


def test_no_room_is_a_store_that_failed(pools: Pools) -> None:
    """Every byte is pinned by a load that has not begun."""
    pool = pools.make(cpu_bytes=12 * PAGE_BYTES)
    for number in range(12):
        assert pool.keep(page(number, 1)) is not None
    pool.generation += 1
    load = pool.generation
    assert pool.connector.after_allocation(Transfer(load, tuple(page(number, 20 + number) for number in range(12))))
    waiting = pool.connector.build_metadata(load, ())
    kept = pool.keep(page(50, 1))
    assert kept is not None and not kept.ok and kept.error is not None and "no room" in kept.error
    assert pool.connector.lookup([digest(50)], 0).num_pages == 0
    pool.worker.run(waiting, record_fence(load, pool.pages.device))
    assert pool.end(load).ok
    assert pool.keep(page(50, 1)) is not None and pool.connector.lookup([digest(50)], 0).num_pages == 1


def test_forget_reaches_what_is_there_and_what_is_on_its_way(pools: Pools) -> None:
    pool = pools.make(disk_bytes=2**24)
    pool.fill(1, 1, 2, 3, 4)
    assert pool.keep(page(1, 1), state(1, 2, 3, 4)) is not None
    pool.generation += 1
    on_its_way = pool.generation
    assert pool.connector.prepare_store(Transfer(on_its_way, (page(2, 2),))) is not None
    pool.step()
    pool.connector.forget([digest(1), digest(2)])
    assert pool.end(on_its_way).ok
    assert pool.connector.lookup([digest(1), digest(2)], 0) == Found(0)
    # The same names with other bytes.
    pool.fill(9, 1, 2)
    assert pool.keep(page(1, 1), page(2, 2)) is not None
    fetched = pool.fetch(page(1, 20), page(2, 21))
    assert fetched is not None and fetched.ok and torch.equal(pool.pages[20:22], pool.pages[1:3])


def test_reset_leaves_what_is_in_flight(pools: Pools) -> None:
    pool = pools.make()
    pool.fill(1, 1, 2)
    assert pool.keep(page(1, 1), page(2, 2)) is not None
    pool.generation += 1
    assert pool.connector.after_allocation(Transfer(pool.generation, (page(1, 10),)))
    pool.connector.reset()
    pool.step()
    assert pool.end(pool.generation).ok and torch.equal(pool.pages[10], pool.pages[1])
    assert pool.connector.lookup([digest(2)], 0).num_pages == 0


def test_cancel_before_it_begins_frees_and_after_does_not(pools: Pools) -> None:
    pool = pools.make()
    assert pool.keep(page(1, 1)) is not None
    assert pool.connector.prepare_store(Transfer(100, (page(2, 2),))) is not None and pool.connector.after_allocation(Transfer(101, (page(1, 9),)))
    assert pool.connector.request_finished([digest(1), digest(2)], [100])
    assert pool.connector.cancel(100) and pool.connector.cancel(101) and not pool.connector.has_pending_work
    assert not pool.connector.request_finished([digest(1), digest(2)], [100])
    assert not pool.connector.build_metadata(1, (3,)).moves
    assert pool.connector.prepare_store(Transfer(102, (page(2, 2),))) is not None
    pool.step()
    assert not pool.connector.cancel(102)
    assert pool.end(102).ok
    assert pool.connector.complete([Completion(102, (True,)), Completion(-5, (True,))]) == []


def test_a_blob_on_its_way_is_not_stored_twice(pools: Pools) -> None:
    pool = pools.make()
    assert pool.connector.prepare_store(Transfer(1, (page(1, 1), page(2, 2)))) is not None
    second = pool.connector.prepare_store(Transfer(2, (page(2, 3), page(3, 4))))
    assert second is not None and [span.digest for span in second.spans] == [digest(3)]
    assert pool.connector.prepare_store(Transfer(3, (page(1, 1),))) is None


def test_what_lmcache_raises_is_a_transfer_that_failed(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.make()
    pool.fill(1, 1)
    assert pool.keep(page(1, 1)) is not None

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("out of sorts")

    with monkeypatch.context() as patch:
        patch.setattr(pool.store._cpu, "get_blocking", fail)
        fetched = pool.fetch(page(1, 9))
        assert fetched is not None and not fetched.ok and "out of sorts" in str(fetched.error)
        patch.setattr(pool.store._manager, "batched_put", fail)
        kept = pool.keep(page(2, 2))
        assert kept is not None and not kept.ok and "out of sorts" in str(kept.error)
        patch.setattr(pool.store._cpu, "allocate", fail)
        kept = pool.keep(page(3, 2))
        assert kept is not None and not kept.ok and "out of sorts" in str(kept.error)
    assert pool.keep(page(2, 2), page(3, 3)) is not None
    # Nothing is held by what failed: all of it can be evicted.
    assert pool.store._manager.memcheck()
    assert all(memory.can_evict for memory in pool.store._cpu.hot_cache.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["loads", "stores"])
def test_a_dead_thread_fails_what_it_had(pools: Pools, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    pool = pools.make()
    assert pool.keep(page(1, 1)) is not None

    def die(*_: Any, **__: Any) -> None:
        raise SystemExit

    mover = pool.worker._loads if way == "loads" else pool.worker._stores
    monkeypatch.setattr(mover, "_move", die)
    for number in (2, 3):
        ended = pool.fetch(page(1, 9)) if way == "loads" else pool.keep(page(number, 2))
        if ended is None:
            # A load that failed has dropped the blob: store it again for the second round.
            assert pool.keep(page(1, 1)) is not None
            ended = pool.fetch(page(1, 9))
        assert ended is not None and not ended.ok and "has ended" in str(ended.error)
    # The other way goes on.
    if way == "loads":
        assert pool.keep(page(7, 1)) is not None
    else:
        fetched = pool.fetch(page(1, 9))
        assert fetched is not None and fetched.ok


def test_closed_twice_and_no_thread_is_left(pools: Pools) -> None:
    before = {thread.name for thread in threading.enumerate()}
    pool = pools.make(disk_bytes=2**24)
    assert pool.keep(page(1, 1)) is not None
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith(("lmcache", "storage-manager")))
    pool.worker.close(5.0)
    pool.worker.close(5.0)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in left if name.startswith(("lmcache", "storage-manager"))}
