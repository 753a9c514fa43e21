"""The tiers' worker on a GPU: every way to issue copies moves every byte, both ways stay behind the fence, and nothing waits for the device."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from atoll.offload.base_worker import Fence, record_fence
from atoll.offload.stream_copier import ISSUES, Issue
from tests.kit.waits import no_waits
from tests.offload.regions import WAIT_S, Setting, random_rows, transfer

pytestmark = pytest.mark.gpu

# About 200 ms at 2 GHz; copies of a few pages take microseconds. Other programs on the GPU may come between, so these tests want it alone.
BUSY_CYCLES = 400_000_000

ADJACENT = (range(1, 9), range(4, 12), range(20, 28))
SCATTERED = ([9, 3, 17, 30, 4], [2, 29, 11, 0, 12], [39, 1, 22, 21, 20])
MIXED = ([5, 6, 7, 12, 13, 30], [8, 9, 10, 20, 22, 21], [35, 34, 33, 2, 4, 3])


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting(device="cuda")
    yield setting
    torch.cuda.synchronize()
    setting.worker.close(WAIT_S)


def check_bytes(setting: Setting, pages: Sequence[int], slots: Sequence[int], targets: Sequence[int]) -> None:
    pool, host = setting.pool.cpu(), setting.host.pages.clone()
    setting.run(stores=[transfer(1, pages, slots)])
    [stored] = setting.ended(1)
    host[list(slots)] = pool[list(pages)]
    assert stored.ok and stored.seconds > 0 and torch.equal(setting.host.pages, host)
    setting.run(loads=[transfer(2, targets, slots)])
    [loaded] = setting.ended(1)
    pool[list(targets)] = host[list(slots)]
    assert loaded.ok and loaded.seconds > 0 and torch.equal(setting.pool.cpu(), pool)
    assert torch.equal(setting.host.pages, host)


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("places", [ADJACENT, SCATTERED, MIXED])
def test_pages_go_and_come_back(places: tuple[Sequence[int], ...], issue: Issue) -> None:
    setting = Setting(device="cuda", issue=issue)
    assert setting.host.is_pinned and setting.host.pages.is_pinned()
    check_bytes(setting, *places)
    setting.worker.close(WAIT_S)
    assert setting.host.num_pages == 0


@pytest.mark.parametrize("issue", ISSUES)
def test_pages_beyond_four_gigabytes(issue: Issue) -> None:
    page_bytes = 1 << 20
    pool = torch.zeros(4200, page_bytes, dtype=torch.uint8, device="cuda")
    pages = [4199, 2100, 4198]
    pool[pages] = random_rows(3, 5, "cuda", page_bytes)
    setting = Setting(num_slots=4, pool=pool, issue=issue)
    setting.run(stores=[transfer(1, pages, [3, 1, 0])])
    assert setting.ended(1)[0].num_bytes == 3 * page_bytes
    assert torch.equal(setting.host.pages[[3, 1, 0]], pool[pages].cpu())
    setting.run(loads=[transfer(2, [4197, 2, 4100], [3, 1, 0])])
    assert setting.ended(1)[0].ok
    assert torch.equal(pool[[4197, 2, 4100]], pool[pages])
    setting.worker.close(WAIT_S)


def busy_then_fill(setting: Setting, pages: Sequence[int], value: int) -> tuple[Fence, Fence]:
    """Keep the compute stream busy, then write pages: fences from before both and from behind them."""
    torch.cuda.synchronize()
    early = record_fence(1, setting.pool.device)
    torch.cuda._sleep(BUSY_CYCLES)
    setting.pool[pages[0] : pages[-1] + 1] = value
    return early, record_fence(1, setting.pool.device)


def test_a_store_reads_what_was_written_before_its_fence(setting: Setting) -> None:
    _, fence = busy_then_fill(setting, [5, 6, 7], 17)
    setting.run(stores=[transfer(1, [5, 6, 7], [2, 9, 4])], fence=fence)
    assert setting.ended(1)[0].ok
    assert bool((setting.host.pages[[2, 9, 4]] == 17).all())


def test_a_store_in_front_of_the_fence_is_seen(setting: Setting) -> None:
    before = setting.pool[5:8].cpu()
    early, _ = busy_then_fill(setting, [5, 6, 7], 17)
    setting.run(stores=[transfer(1, [5, 6, 7], [2, 9, 4])], fence=early)
    assert setting.ended(1)[0].ok
    assert torch.equal(setting.host.pages[[2, 9, 4]], before)


def test_a_load_writes_behind_the_clears_before_its_fence(setting: Setting) -> None:
    _, fence = busy_then_fill(setting, [5, 6, 7], 0)
    setting.run(loads=[transfer(1, [5, 6, 7], [2, 9, 4])], fence=fence)
    assert setting.ended(1)[0].ok
    assert torch.equal(setting.pool[5:8].cpu(), setting.host.pages[[2, 9, 4]])


def test_a_load_in_front_of_the_fence_is_cleared_again(setting: Setting) -> None:
    early, _ = busy_then_fill(setting, [5, 6, 7], 0)
    setting.run(loads=[transfer(1, [5, 6, 7], [2, 9, 4])], fence=early)
    assert setting.ended(1)[0].ok
    torch.cuda.synchronize()
    assert not bool(setting.pool[5:8].any())


def test_nothing_waits_and_nothing_is_told_before_the_device_has_done_it(setting: Setting) -> None:
    with no_waits():
        torch.cuda._sleep(BUSY_CYCLES)
        setting.run(loads=[transfer(1, [5, 6], [2, 3]), transfer(2, [9], [4])], stores=[transfer(3, [10, 11], [5, 6]), transfer(4, [12], [7])])
        assert setting.worker.poll() == []
        setting.worker.wait(0.001)
        assert setting.worker.poll() == []
        ended = setting.ended(4)
    assert {completion.generation for completion in ended} == {1, 2, 3, 4} and all(completion.ok for completion in ended)
    assert setting.worker.poll() == []


def test_what_is_issued_after_a_completion_reads_the_loaded_bytes(setting: Setting) -> None:
    for i_round in range(20):
        pages = [(7 * i_round + i) % 39 + 1 for i in range(4)]
        slots = [(5 * i_round + i) % 30 for i in range(4)]
        setting.run(loads=[transfer(1 + i_round, pages, slots)])
        assert setting.ended(1)[0].ok
        assert torch.equal((setting.pool[pages] + 1).cpu(), setting.host.pages[slots] + 1)


def test_memory_stays_while_a_copy_is_in_flight() -> None:
    setting = Setting(device="cuda")
    torch.cuda._sleep(20 * BUSY_CYCLES)
    setting.run(loads=[transfer(1, [5, 6], [2, 3])])
    setting.worker.close(0.01)
    assert setting.host.num_pages == 30 and setting.host.is_pinned
    torch.cuda.synchronize()
    setting.worker.close(WAIT_S)
    assert setting.host.num_pages == 0 and not setting.host.is_pinned


def test_copies_that_are_in_flight_do_not_break_a_capture(setting: Setting) -> None:
    rows = torch.ones(64, device="cuda")
    _ = rows * 2
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * BUSY_CYCLES)
    setting.run(loads=[transfer(1, [5, 6], [2, 3])])
    # Not by torch.cuda.graph, which waits for the device first.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        doubled = rows * 2
        graph.capture_end()
    assert setting.worker.poll() == []
    assert setting.ended(1)[0].ok
    assert torch.equal(setting.pool[5:7].cpu(), setting.host.pages[2:4])
    graph.replay()
    assert float(doubled.sum()) == 128
