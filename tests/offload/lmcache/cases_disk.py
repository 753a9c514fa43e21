"""LMCache's disk: what it gives wrongly is a load that failed, and without checksums it is wrong bytes."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.offload.base import Transfer
from atoll.offload.base_worker import record_fence
from tests.offload.lmcache.pool import KV, Pool, Pools, digest, page


def from_disk(pools: Pools) -> tuple[Pool, Path]:
    """A pool of which page 0 is in LMCache's disk alone, and its file there."""
    pool = pools.make(cpu_bytes=16 * 12288, disk_bytes=2**24)
    for number in range(17):
        pool.fill(8 if number == 0 else number, 1 if number == 0 else 2)
        assert pool.keep(page(number, 1 if number == 0 else 2)) is not None
        # LMCache evicts nothing that it is still writing.
        wait_for(lambda number=number: pool.store._disk.contains(pool.store.key(KV, digest(number), 0)))  # type: ignore[misc]
    key = pool.store.key(KV, digest(0), 0)
    assert not pool.store._cpu.contains(key) and pool.connector.lookup([digest(0)], 0).num_pages == 1
    return pool, Path(pool.store._disk.dict[key].path)


def wait_for(done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come")


def test_a_blob_comes_back_from_disk(pools: Pools) -> None:
    pool, _ = from_disk(pools)
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.ok and torch.equal(pool.pages[30], pool.pages[1])


FAULTS = {
    "shorter": lambda data: data[:100],
    "a bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "empty": lambda data: b"",
    "another's": None,
    "deleted": None,
}


def harm(path: Path, fault: str) -> None:
    if fault == "deleted":
        path.unlink()
    elif fault == "another's":
        other = next(p for p in path.parent.iterdir() if p != path)
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(FAULTS[fault](path.read_bytes()))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_disk_gives_wrongly_is_a_load_that_failed(pools: Pools, fault: str) -> None:
    pool, file = from_disk(pools)
    harm(file, fault)
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.arrived == (False,)
    assert pool.connector.lookup([digest(0)], 0).num_pages == 0
    # Stored anew, it comes back right, from memory and from disk.
    assert pool.keep(page(0, 1)) is not None
    fetched = pool.fetch(page(0, 31))
    assert fetched is not None and fetched.ok and torch.equal(pool.pages[31], pool.pages[1])


@pytest.mark.parametrize("fault", ["shorter", "a bit", "another's"])
def test_control_without_checksums_wrong_bytes_arrive(pools: Pools, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr("atoll.offload.lmcache_store._checksum", lambda key, data: bytes(8))
    pool, file = from_disk(pools)
    # Behind a file's early end comes through what lay in LMCache's memory before.
    harm(file, fault)
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.ok and not torch.equal(pool.pages[30], pool.pages[1])


def test_a_read_without_room_is_a_load_that_failed(pools: Pools) -> None:
    """LMCache would wait for room as long as a load that has not begun holds everything."""
    pool, _ = from_disk(pools)
    pool.generation += 1
    holding = pool.generation
    assert pool.connector.after_allocation(Transfer(holding, tuple(page(number, 40 + number) for number in range(1, 17))))
    waiting = pool.connector.build_metadata(holding, ())
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.arrived == (False,)
    pool.worker.run(waiting, record_fence(holding, pool.pages.device))
    assert pool.end(holding).ok


def test_a_full_disk_costs_room_and_no_byte(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """What LMCache could not write stays in its memory for good, and once that is full stores fail; what is there comes back right."""
    pool = pools.make(cpu_bytes=16 * 12288, disk_bytes=2**24)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(pool.store._disk, "write_file", fail)
    kept = []
    for number in range(20):
        pool.fill(number, number)
        completion = pool.keep(page(number, number))
        assert completion is not None
        kept.append(completion.ok)
    assert kept == [True] * 16 + [False] * 4
    for number in range(16):
        fetched = pool.fetch(page(number, 50))
        assert fetched is not None and fetched.ok and torch.equal(pool.pages[50], pool.pages[number])
