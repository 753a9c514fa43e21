"""LMCache's memory beside a GPU: pinned, and its copies ordered behind the fence."""

import pytest
import torch

from atoll.offload.base_worker import Fence
from tests.offload.lmcache.pool import KV, Pools, digest, page, state

pytestmark = pytest.mark.gpu
SLEEP_CYCLES = 400_000_000  # a fifth of a second; a copy of a page takes microseconds


def write_late(pages: torch.Tensor, value: int) -> None:
    """Compute work that has been issued and not been done."""
    torch.cuda._sleep(SLEEP_CYCLES)
    pages.fill_(value)


def test_memory_is_pinned(pools: Pools) -> None:
    pool = pools.make()
    pool.fill(1, 1)
    assert pool.keep(page(1, 1)) is not None
    memory = pool.store.get(pool.store.key(KV, digest(1), 0), pool.pages.shape[1])
    assert memory is not None and pool.store.data(memory, pool.pages.shape[1]).is_pinned()
    pool.store.release(memory)


def test_a_store_reads_what_was_issued_before_its_fence(pools: Pools) -> None:
    pool = pools.make()
    pool.pages.fill_(1)
    write_late(pool.pages[2:6], 7)
    kept = pool.keep(page(2, 2), state(2, 3, 4, 5))
    assert kept is not None and kept.ok
    fetched = pool.fetch(page(2, 20), state(2, 21, 22, 23))
    assert fetched is not None and fetched.ok and bool((pool.pages[20:24] == 7).all())


def test_a_load_writes_behind_what_was_issued_before_its_fence(pools: Pools) -> None:
    pool = pools.make()
    pool.pages.fill_(5)
    assert pool.keep(page(2, 2)) is not None
    write_late(pool.pages[9:10], 0)
    fetched = pool.fetch(page(2, 9))
    torch.cuda.synchronize()
    assert fetched is not None and fetched.ok and bool((pool.pages[9] == 5).all())


@pytest.mark.parametrize("way", ["store", "load"])
def test_control_without_a_fence_the_order_is_lost(pools: Pools, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr("tests.offload.lmcache.pool.record_fence", lambda number, device: Fence(number))
    pool = pools.make()
    pool.pages.fill_(5)
    torch.cuda.synchronize()
    if way == "store":
        write_late(pool.pages[2:3], 7)
        assert pool.keep(page(2, 2)) is not None
        torch.cuda.synchronize()
        fetched = pool.fetch(page(2, 9))
        torch.cuda.synchronize()
        assert fetched is not None and fetched.ok and not bool((pool.pages[9] == 7).any())
    else:
        assert pool.keep(page(2, 2)) is not None
        write_late(pool.pages[9:10], 0)
        fetched = pool.fetch(page(2, 9))
        torch.cuda.synchronize()
        assert fetched is not None and fetched.ok and not bool((pool.pages[9] == 5).any())
