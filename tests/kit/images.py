"""Cases of image copies: pools of random bytes, copies at shuffled places, and what must hold afterwards. Shared by the CPU, the interpreter and the GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from atoll.engine.step import StateCopy
from atoll.kv import PageLayout, PagePool, SlotLayout, SlotPool, num_image_pages
from atoll.ops.delta import DeltaSpec

Copies = Sequence[StateCopy]
Save = Callable[[SlotPool, PagePool, Copies], None]

SPEC = DeltaSpec(2, 4, 8, 12, conv_width=4, dtype=torch.bfloat16)


@dataclass(frozen=True)
class ImageCase:
    """Slots of `num_layers` layers, 2048 bytes each, and pages of 256 bytes a token and head; every byte is random, so NaN of every format is among them."""

    num_layers: int
    page_size: int  # tokens
    num_heads: int = 1
    num_copies: int = 3
    fill: str = "random"
    spec: DeltaSpec = SPEC

    def make(self, device: str = "cpu") -> tuple[SlotPool, PagePool, list[StateCopy]]:
        layout = PageLayout(1, self.num_heads, 64, self.page_size)
        slots = SlotPool(SlotLayout(self.num_layers, self.spec), self.num_copies + 2, device, self.fill, seed=1)  # type: ignore[arg-type]
        need = num_image_pages(slots.layout.slot_bytes, layout.page_bytes)
        pool = PagePool(layout, 1 + need * self.num_copies + 4, device, "random", seed=2)
        generator = torch.Generator().manual_seed(3)
        ids = (torch.randperm(pool.num_pages - 1, generator=generator) + 1).tolist()
        order = torch.randperm(slots.num_slots, generator=generator).tolist()
        return slots, pool, [StateCopy(order[i], tuple(ids[i * need : (i + 1) * need])) for i in range(self.num_copies)]


CASES = {
    "many pages, dividing": ImageCase(4, 1),
    "many pages, a rest": ImageCase(3, 1, num_heads=5),
    "two pages, a rest": ImageCase(3, 16),
    "a page larger than the slot": ImageCase(1, 16),
    "a page of exactly the slot": ImageCase(2, 16),
    "two programs a page": ImageCase(13, 64),
    "one copy": ImageCase(3, 2, num_copies=1),
    "all NaN": ImageCase(3, 2, fill="nan"),
}


def differences(case: ImageCase, save: Save, restore: Save, device: str = "cpu") -> list[str]:
    """What a round trip got wrong: slots -> images, then images -> other slots, every byte of both pools compared."""
    slots, pool, copies = case.make(device)
    states, pages = slots.buffer.clone(), pool.buffer.clone()
    save(slots, pool, copies)
    faults = []
    if not torch.equal(slots.buffer, states):
        faults.append("saving changed a slot")
    for copy in copies:
        overlay(pages, copy.pages, states[copy.state_slot])
    if not torch.equal(pool.buffer, pages):
        faults.append("the pages are not the states laid over them, and their own bytes elsewhere")
    shifted = [replace(copy, state_slot=(copy.state_slot + 1) % slots.num_slots) for copy in copies]
    restore(slots, pool, shifted)
    for source, target in zip(copies, shifted, strict=True):
        if not torch.equal(slots.buffer[target.state_slot], states[source.state_slot]):
            faults.append(f"slot {target.state_slot} is not what slot {source.state_slot} held")
    kept = sorted(set(range(slots.num_slots)) - {copy.state_slot for copy in shifted})
    if not torch.equal(slots.buffer[kept], states[kept]) or not torch.equal(pool.buffer, pages):
        faults.append("restoring changed another slot or a page")
    return faults


def overlay(pages: torch.Tensor, ids: Sequence[int], state: torch.Tensor) -> None:
    """By its definition: byte `i` of the state lies in the image's page `i // page_bytes`, at `i % page_bytes`."""
    place = torch.arange(len(state), device=state.device)
    pages[torch.tensor(ids, device=state.device)[place // pages.shape[1]], place % pages.shape[1]] = state
