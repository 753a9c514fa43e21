"""The Triton kernel behind `save_states` and `restore_states`: each program copies one part of one page of one image."""

import torch
import triton
import triton.language as tl

# 8 KiB a program: a state of 60 MB is 7,500 programs, many times what a device runs at once, and a tiny page is still one.
BLOCK_WORDS = 1024


def copy_images_triton(
    states: torch.Tensor,  # [R, slot_bytes] uint8
    pages: torch.Tensor,  # [P, page_bytes] uint8
    index: torch.Tensor,  # [N, 1 + pages of an image] int64: slot, then pages
    *,
    save: bool,  # slots -> pages; else pages -> slots
) -> None:
    """Launch over checked arguments; see `save_states`. Both spans are multiples of 128 bytes, so they are moved as words of 8."""
    num_copies, num_pages = index.shape[0], index.shape[1] - 1
    slot_words, page_words = states.shape[1] // 8, pages.shape[1] // 8
    image_copy_kernel[(num_copies * num_pages, triton.cdiv(page_words, BLOCK_WORDS))](
        states.view(torch.int64),
        pages.view(torch.int64),
        index,
        num_pages,
        slot_words,
        page_words,
        SAVE=save,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
    )


@triton.jit
def image_copy_kernel(
    states,  # [R, slot_words] int64
    pages,  # [P, page_words] int64
    index,  # [N, 1 + num_pages] int64
    num_pages,
    slot_words,
    page_words,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_copy = tl.program_id(0) // num_pages
    i_page = tl.program_id(0) % num_pages
    p_index = index + i_copy.to(tl.int64) * (num_pages + 1)
    slot = tl.load(p_index)
    page = tl.load(p_index + 1 + i_page)
    o_word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Place in the state; what the last page has beyond it is not touched.
    o_state = i_page.to(tl.int64) * page_words + o_word
    m_word = (o_word < page_words) & (o_state < slot_words)
    p_state = states + slot * slot_words + o_state
    p_page = pages + page * page_words + o_word
    if SAVE:
        tl.store(p_page, tl.load(p_state, mask=m_word), mask=m_word)
    else:
        tl.store(p_state, tl.load(p_page, mask=m_word), mask=m_word)
