"""Page images: whole states copied from their slots to pages of the pool and back, all copies of a step at once; knows no request and no checkpoint."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from atoll.errors import PoolError
from atoll.kv.ledger import NULL_PAGE
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool


class ImageCopy(Protocol):
    """A state's slot, and the pages of its image in order."""

    @property
    def state_slot(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


def num_image_pages(slot_bytes: int, page_bytes: int) -> int:
    """Pages that one state's image takes."""
    return -(-slot_bytes // page_bytes)


def save_states(slots: SlotPool, pool: PagePool, copies: Sequence[ImageCopy]) -> None:
    """Copy each slot's bytes to the pages of its image, on the current stream, in one operation on a GPU, without waiting for it.

    The raw bytes are laid over the pages in order, at any page ids. What the last page has left beyond the state is not written: no sequence owns it.

    Raises PoolError, before anything is copied, for a wrong number of pages, an id outside the pools, the null page, and a page that is written twice.
    """
    _check_copies(slots, pool, copies)
    _check_written_once("page", [page for copy in copies for page in copy.pages])
    _copy(slots, pool, copies, save=True)


def restore_states(slots: SlotPool, pool: PagePool, copies: Sequence[ImageCopy]) -> None:
    """Copy each image's bytes back to its slot; the inverse of `save_states`. Several slots may be restored from one image.

    Raises PoolError, before anything is copied, as `save_states` does, and for a slot that is written twice.
    """
    _check_copies(slots, pool, copies)
    _check_written_once("slot", [copy.state_slot for copy in copies])
    _copy(slots, pool, copies, save=False)


def _copy(slots: SlotPool, pool: PagePool, copies: Sequence[ImageCopy], *, save: bool) -> None:
    if not copies:
        return
    if pool.device.type == "cuda":
        # Not above: a CPU engine needs no Triton.
        from atoll.kv.triton_images import copy_images_triton

        rows = [[copy.state_slot, *copy.pages] for copy in copies]
        index = torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(pool.device, non_blocking=True)
        copy_images_triton(slots.buffer, pool.buffer, index, save=save)
        return
    page_bytes = pool.layout.page_bytes
    for copy in copies:
        state = slots.buffer[copy.state_slot]
        for page, part in zip(copy.pages, state.split(page_bytes), strict=True):
            span = pool.buffer[page, : len(part)]
            span.copy_(part) if save else part.copy_(span)


def _check_copies(slots: SlotPool, pool: PagePool, copies: Sequence[ImageCopy]) -> None:
    if slots.device != pool.device:
        raise PoolError(f"the slots are on {slots.device}, the pages on {pool.device}; keep both on one device")
    slot_bytes, page_bytes = slots.layout.slot_bytes, pool.layout.page_bytes
    need = num_image_pages(slot_bytes, page_bytes)
    for copy in copies:
        if len(copy.pages) != need:
            raise PoolError(f"{len(copy.pages)} pages are given for an image of {slot_bytes} bytes, which takes {need} of {page_bytes} bytes; give {need}")
        if not 0 <= copy.state_slot < slots.num_slots:
            raise PoolError(f"slot {copy.state_slot} is outside 0 to {slots.num_slots - 1}; use slots of this pool")
        for page in copy.pages:
            if not NULL_PAGE < page < pool.num_pages:
                raise PoolError(f"page {page} of an image is outside 1 to {pool.num_pages - 1}; use ids that allocate returned, never the null page")


def _check_written_once(noun: str, ids: list[int]) -> None:
    for written, times in Counter(ids).items():
        if times > 1:
            raise PoolError(f"{noun} {written} is written {times} times in one step, once is the limit; give each copy its own")
