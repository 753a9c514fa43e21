"""Pools and host pages for tests of the worker, and transfers between pages and slots that are named one by one."""

from collections.abc import Sequence

import torch

from atoll.offload.base import BlobKind, Completion, Metadata, Span, Transfer
from atoll.offload.base_worker import Fence, Regions, record_fence
from atoll.offload.host_pages import HostPages
from atoll.offload.stream_copier import Issue
from atoll.offload.worker import TierWorker

PAGE_BYTES = 4096
WAIT_S = 30.0  # for what happens at once; a test that waits this long has failed


def random_rows(num_rows: int, seed: int, device: torch.device | str = "cpu", page_bytes: int = PAGE_BYTES) -> torch.Tensor:
    """[num_rows, page_bytes] uint8."""
    rand = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_rows, page_bytes), dtype=torch.uint8, generator=rand).to(device)


def transfer(generation: int, pages: Sequence[int], slots: Sequence[int], *, image_pages: int = 0) -> Transfer:
    """KV pages, the last `image_pages` of them a state's image."""
    num_kv = len(pages) - image_pages
    spans = [Span(BlobKind.KV, bytes([generation % 256, i]), (page,)) for i, page in enumerate(pages[:num_kv])]
    if image_pages:
        spans.append(Span(BlobKind.STATE, bytes([generation % 256]), tuple(pages[num_kv:])))
    return Transfer(generation, tuple(spans), note=tuple(slots))


class Setting:
    """A registered worker between a pool of random bytes and host pages of other random bytes."""

    def __init__(
        self,
        num_pages: int = 40,
        num_slots: int = 30,
        device: torch.device | str = "cpu",
        *,
        pool: torch.Tensor | None = None,  # instead of random bytes
        issue: Issue = "auto",
        worker: TierWorker | None = None,
    ) -> None:
        self.pool = random_rows(num_pages, 0, device) if pool is None else pool
        page_bytes = self.pool.shape[1]
        self.host = HostPages.anonymous(num_slots, page_bytes)
        self.host.pages.copy_(random_rows(num_slots, 1, page_bytes=page_bytes))
        self.worker = worker or TierWorker(self.host, issue=issue)
        self.worker.register(Regions(self.pool, image_pages=3))
        self.num_steps = 0

    def run(self, loads: Sequence[Transfer] = (), stores: Sequence[Transfer] = (), note: object = None, fence: Fence | None = None) -> None:
        """A step's transfers, behind all that was issued so far where no fence is given."""
        self.num_steps += 1
        metadata = Metadata(self.num_steps, loads=tuple(loads), stores=tuple(stores), note=note)
        self.worker.run(metadata, fence or record_fence(self.num_steps, self.pool.device))

    def ended(self, count: int) -> list[Completion]:
        """So many completions, waited for."""
        completions: list[Completion] = []
        while len(completions) < count:
            self.worker.wait(WAIT_S)
            told = self.worker.poll()
            assert told, f"{len(completions)} of {count} transfers have ended within {WAIT_S} s"
            completions += told
        assert len(completions) == count
        return completions
