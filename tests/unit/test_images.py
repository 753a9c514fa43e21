"""Page images: a round trip keeps every byte and touches no other, in PyTorch, in the Triton kernel interpreted, and on a GPU."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from atoll.engine.step import StateCopy
from atoll.errors import PoolError
from atoll.kv import PageLayout, PagePool, SlotLayout, SlotPool, restore_states, save_states
from atoll.kv.images import num_image_pages
from atoll.kv.triton_images import BLOCK_WORDS
from atoll.ops.delta import DeltaSpec
from tests.kit.build import TARGETS
from tests.kit.image_copies import image_costs, interpreted_differences
from tests.kit.images import CASES, Save, differences, overlay
from tests.kit.waits import no_waits
from tests.kit.workers import WorkerPool, compiling_pool, interpreting_pool

WITH_A_REST = {"many pages, a rest", "two pages, a rest", "a page larger than the slot", "two programs a page"}


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_byte_and_touches_no_other(name: str) -> None:
    assert differences(CASES[name], save_states, restore_states) == []


def test_the_cases_are_what_they_are_called() -> None:
    bytes_of = {name: tuple(part.buffer.shape[1] for part in case.make()[:2]) for name, case in CASES.items()}
    assert {name for name, (slot, page) in bytes_of.items() if slot % page} == {
        "many pages, a rest",
        "two pages, a rest",
        "a page larger than the slot",
        "two programs a page",
    }
    assert {name for name, (slot, page) in bytes_of.items() if slot < page} == {"a page larger than the slot"}
    assert {name for name, (slot, page) in bytes_of.items() if slot == page} == {"a page of exactly the slot"}
    assert {name for name, (_, page) in bytes_of.items() if page > 8 * BLOCK_WORDS} == {"two programs a page"}


@pytest.mark.parametrize(("slot_bytes", "page_bytes", "pages"), [(1, 128, 1), (128, 128, 1), (129, 128, 2), (65536, 4096, 16), (65537, 4096, 17)])
def test_pages_of_an_image(slot_bytes: int, page_bytes: int, pages: int) -> None:
    assert num_image_pages(slot_bytes, page_bytes) == pages


def test_no_copy_is_no_work() -> None:
    slots, pool, _ = CASES["one copy"].make()
    states, pages = slots.buffer.clone(), pool.buffer.clone()
    save_states(slots, pool, [])
    restore_states(slots, pool, [])
    assert torch.equal(slots.buffer, states) and torch.equal(pool.buffer, pages)


def test_one_image_restores_several_slots() -> None:
    slots, pool, [copy] = CASES["one copy"].make()
    save_states(slots, pool, [copy])
    others = [slot for slot in range(slots.num_slots) if slot != copy.state_slot]
    restore_states(slots, pool, [replace(copy, state_slot=slot) for slot in others])
    assert all(torch.equal(slots.buffer[slot], slots.buffer[copy.state_slot]) for slot in others)


# Slots of 6144 bytes, pages of 1280: 5 pages each.
@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([StateCopy(0, (1, 2, 3, 4))], "4 pages are given for an image of 6144 bytes, which takes 5 of 1280 bytes; give 5"),
        ([StateCopy(0, (1, 2, 3, 4, 5, 6))], "6 pages are given for an image of 6144 bytes, which takes 5 of 1280 bytes; give 5"),
        ([StateCopy(0, ())], "0 pages are given for an image"),
        ([StateCopy(5, (1, 2, 3, 4, 5))], "slot 5 is outside 0 to 4; use slots of this pool"),
        ([StateCopy(-1, (1, 2, 3, 4, 5))], "slot -1 is outside 0 to 4"),
        ([StateCopy(0, (1, 2, 3, 4, 0))], "page 0 of an image is outside 1 to 19; use ids that allocate returned, never the null page"),
        ([StateCopy(0, (20, 2, 3, 4, 5))], "page 20 of an image is outside 1 to 19"),
    ],
)
@pytest.mark.parametrize("copy_states", [save_states, restore_states])
def test_wrong_copies_change_nothing(copies: list[StateCopy], message: str, copy_states: Save) -> None:
    slots, pool, _ = CASES["many pages, a rest"].make()
    states, pages = slots.buffer.clone(), pool.buffer.clone()
    with pytest.raises(PoolError, match=re.escape(message)):
        copy_states(slots, pool, [StateCopy(1, (10, 11, 12, 13, 14)), *copies])
    assert torch.equal(slots.buffer, states) and torch.equal(pool.buffer, pages)


def test_what_two_copies_would_write_is_refused() -> None:
    slots, pool, [a, b, _] = CASES["two pages, a rest"].make()
    with pytest.raises(PoolError, match=re.escape(f"page {a.pages[0]} is written 2 times in one step, once is the limit")):
        save_states(slots, pool, [a, replace(b, pages=(b.pages[0], a.pages[0]))])
    with pytest.raises(PoolError, match=re.escape(f"slot {a.state_slot} is written 2 times in one step")):
        restore_states(slots, pool, [a, replace(b, state_slot=a.state_slot)])


def test_control_pages_in_the_wrong_order_show() -> None:
    def reversed_pages(slots: SlotPool, pool: PagePool, copies: list[StateCopy]) -> None:
        save_states(slots, pool, [replace(copy, pages=copy.pages[::-1]) for copy in copies])

    assert differences(CASES["many pages, a rest"], reversed_pages, restore_states)  # type: ignore[arg-type]


# The Triton kernel


@pytest.fixture(scope="module")
def interpreting() -> Iterator[WorkerPool]:
    pool = interpreting_pool()
    yield pool
    pool.close()


def test_the_kernel_interpreted_gives_the_same_bytes(interpreting: WorkerPool) -> None:
    assert interpreting.submit(interpreted_differences).result() == {name: [] for name in CASES}


def test_control_a_kernel_that_writes_a_page_to_its_end_shows(interpreting: WorkerPool) -> None:
    faults = interpreting.submit(interpreted_differences, whole_pages=True).result()
    assert {name for name, found in faults.items() if found} == WITH_A_REST


def test_the_kernel_builds_without_spills() -> None:
    pool = compiling_pool()
    builds = {target: pool.submit(image_costs, target) for target in TARGETS}
    costs = {target: build.result() for target, build in builds.items()}
    pool.close()
    assert {target: [(cost.kernel, cost.fault) for cost in found] for target, found in costs.items()} == dict.fromkeys(
        TARGETS, [("image_copy_kernel", None)] * 2
    )


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_on_a_gpu(name: str) -> None:
    assert differences(CASES[name], save_states, restore_states, "cuda") == []


@pytest.mark.gpu
def test_copies_on_a_gpu_do_not_wait_for_it() -> None:
    slots, pool, copies = CASES["many pages, a rest"].make("cuda")
    save_states(slots, pool, copies)
    with no_waits():
        save_states(slots, pool, copies)
        restore_states(slots, pool, copies)
    torch.cuda.synchronize()
    assert torch.equal(pool.buffer[copies[0].pages[0]], slots.buffer[copies[0].state_slot, : pool.layout.page_bytes])


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31_bytes() -> None:
    # 3 GB of each: slots of 8 MiB, pages of 1 MiB.
    slots = SlotPool(SlotLayout(4, DeltaSpec(16, 32, 128, 128, 4, torch.bfloat16)), 384, "cuda")
    pool = PagePool(PageLayout(8, 2, 128, 128), 3000, "cuda")
    assert slots.num_bytes > 2**31 and pool.num_bytes > 2**31
    need = num_image_pages(slots.layout.slot_bytes, pool.layout.page_bytes)
    last = slots.num_slots - 1
    slots.buffer[last].random_(0, 256)
    pages = tuple(range(pool.num_pages - need, pool.num_pages))[::-1]
    save_states(slots, pool, [StateCopy(last, pages)])
    expected = torch.zeros_like(pool.buffer[-need:])
    overlay(expected, [page - pool.num_pages + need for page in pages], slots.buffer[last])
    assert torch.equal(pool.buffer[-need:], expected)
    assert not pool.buffer[:-need].any()
    restore_states(slots, pool, [StateCopy(last - 1, pages)])
    assert torch.equal(slots.buffer[last - 1], slots.buffer[last])
    assert not slots.buffer[: last - 1].any()
