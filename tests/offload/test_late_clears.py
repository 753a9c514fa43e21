"""The control of `atoll eval replay`: with it loaded pages are zero where a clear was due, always and at the same step; without it they are what was loaded."""

import pytest
import torch

from atoll.eval.late_clears import LateClears
from atoll.offload.base import BlobKind, Completion, Metadata, Span, Transfer
from atoll.offload.base_worker import Fence, Regions, TransferWorker


class Filler:
    """Loads by filling pages with 7, and tells of it after so many waits."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self._left = 0
        self._loads: list[Transfer] = []

    def register(self, regions: Regions) -> None:
        self._pages = regions.pages

    def run(self, metadata: Metadata, fence: Fence) -> None:
        self._loads += metadata.loads
        self._left = self.waits

    def poll(self) -> list[Completion]:
        if self._left or not self._loads:
            return []
        ended, self._loads = self._loads, []
        for load in ended:
            self._pages[load.pages] = 7
        return [Completion(load.generation, (True,) * len(load.spans)) for load in ended]

    def wait(self, timeout_s: float) -> None:
        self._left = max(0, self._left - 1)

    def close(self, timeout_s: float) -> None:
        """Holds nothing."""


def load(generation: int, *pages: int) -> Transfer:
    return Transfer(generation, tuple(Span(BlobKind.KV, bytes([page]), (page,)) for page in pages))


def run(worker: TransferWorker, pages: torch.Tensor, clears: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """What four pages hold after a load of pages 1 and 2, and the generations that each poll told of."""
    worker.register(Regions(pages, image_pages=0))
    pages[list(clears)] = 0  # as the engine does, before the fence
    worker.run(Metadata(1, clears, (load(1, 1, 2),)), Fence(1))
    told = [[completion.generation for completion in worker.poll()] for _ in range(2)]
    return pages[:, 0].tolist(), told


@pytest.mark.parametrize("waits", [0, 1, 5])
def test_a_clear_comes_after_the_load_and_the_load_ends_at_the_next_poll(waits: int) -> None:
    pages = torch.full((4, 8), 9, dtype=torch.uint8)
    assert run(LateClears(Filler(waits), pages), pages, clears=(2, 3)) == ([9, 7, 0, 0], [[1], []])


def test_without_a_clear_nothing_is_lost() -> None:
    pages = torch.full((4, 8), 9, dtype=torch.uint8)
    assert run(LateClears(Filler(1), pages), pages, clears=()) == ([9, 7, 7, 9], [[1], []])


def test_control_in_order_the_load_is_what_stays() -> None:
    assert run(Filler(0), torch.full((4, 8), 9, dtype=torch.uint8), clears=(2, 3)) == ([9, 7, 7, 0], [[1], []])
