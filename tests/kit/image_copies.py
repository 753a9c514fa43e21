"""The image kernel interpreted, and its recorded launches for ahead-of-time builds: functions for worker processes."""

from collections.abc import Sequence
from unittest import mock

import torch
import triton
import triton.language as tl

from atoll.engine.step import StateCopy
from atoll.kv import PagePool, SlotPool, triton_images
from tests.kit.build import Cost, build, recorded_launches
from tests.kit.images import CASES, differences


@triton.jit
def whole_page_kernel(states, pages, index, num_pages, slot_words, page_words, SAVE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The image kernel, but that it writes the last page to its end, with zeros."""
    i_copy = tl.program_id(0) // num_pages
    i_page = tl.program_id(0) % num_pages
    p_index = index + i_copy.to(tl.int64) * (num_pages + 1)
    slot = tl.load(p_index)
    page = tl.load(p_index + 1 + i_page)
    o_word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_state = i_page.to(tl.int64) * page_words + o_word
    m_word = (o_word < page_words) & (o_state < slot_words)
    p_state = states + slot * slot_words + o_state
    p_page = pages + page * page_words + o_word
    if SAVE:
        tl.store(p_page, tl.load(p_state, mask=m_word, other=0), mask=o_word < page_words)
    else:
        tl.store(p_state, tl.load(p_page, mask=m_word), mask=m_word)


def interpreted_differences(whole_pages: bool = False) -> dict[str, list[str]]:
    """Per case what the kernel gets wrong under Triton's interpreter."""
    with mock.patch.object(triton_images, "image_copy_kernel", whole_page_kernel if whole_pages else triton_images.image_copy_kernel):
        return {name: differences(case, _save, _restore) for name, case in CASES.items()}


def image_costs(target: str) -> list[Cost]:
    """What both directions take of a target."""
    slots, pool, copies = CASES["many pages, a rest"].make()
    with recorded_launches((triton_images, "image_copy_kernel")) as launches:
        _save(slots, pool, copies)
        _restore(slots, pool, copies)
    return [build(launch, target) for launch in launches]


def _save(slots: SlotPool, pool: PagePool, copies: Sequence[StateCopy]) -> None:
    triton_images.copy_images_triton(slots.buffer, pool.buffer, _index(copies), save=True)


def _restore(slots: SlotPool, pool: PagePool, copies: Sequence[StateCopy]) -> None:
    triton_images.copy_images_triton(slots.buffer, pool.buffer, _index(copies), save=False)


def _index(copies: Sequence[StateCopy]) -> torch.Tensor:
    return torch.tensor([[copy.state_slot, *copy.pages] for copy in copies], dtype=torch.int64)
