"""LMCache's disk: what it gives wrongly is a load that failed, and without checksums it is wrong bytes."""

import threading
from pathlib import Path

import pytest
import torch

from tests.offload.lmcache.pool import KV, Pool, Pools, digest, page


def from_disk(pools: Pools) -> tuple[Pool, list[Path]]:
    """A pool of which page 0 is in LMCache's disk alone, and the files there."""
    pool = pools.make(cpu_bytes=16 * 12288, disk_bytes=2**24)
    pool.fill(8, 1)
    assert pool.keep(page(0, 1)) is not None
    for number in range(1, 17):
        pool.fill(number, 2)
        assert pool.keep(page(number, 2)) is not None
    key = pool.store.key(KV, digest(0), 0)
    assert not pool.store._cpu.contains(key)
    for _ in range(100):
        if pool.store.has(key):
            break
        threading.Event().wait(0.05)
    assert pool.connector.lookup([digest(0)], 0).num_pages == 1
    return pool, [path for path in Path(pool.store._disk.path).iterdir() if "@" + "0" in path.name and path.name == Path(pool.store._disk.dict[key].path).name]


def test_a_blob_comes_back_from_disk(pools: Pools) -> None:
    pool, files = from_disk(pools)
    assert len(files) == 1
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.ok and torch.equal(pool.pages[30], pool.pages[1])


FAULTS = {
    "shorter": lambda data: data[:100],
    "a bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "empty": lambda data: b"",
    "another's": None,
    "deleted": None,
}


def harm(files: list[Path], fault: str) -> None:
    (path,) = files
    if fault == "deleted":
        path.unlink()
    elif fault == "another's":
        other = next(p for p in path.parent.iterdir() if p != path)
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(FAULTS[fault](path.read_bytes()))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_disk_gives_wrongly_is_a_load_that_failed(pools: Pools, fault: str) -> None:
    pool, files = from_disk(pools)
    harm(files, fault)
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
    pool, files = from_disk(pools)
    content = files[0].read_bytes()
    if fault == "shorter":
        # What lies in LMCache's memory from before comes through behind the file's end.
        files[0].write_bytes(content[:100])
        fetched = pool.fetch(page(0, 30))
        assert fetched is not None and (not fetched.ok or not torch.equal(pool.pages[30], pool.pages[1]))
        return
    harm(files, fault)
    fetched = pool.fetch(page(0, 30))
    assert fetched is not None and fetched.ok and not torch.equal(pool.pages[30], pool.pages[1])
