"""A plain buffer with both sides of the connector around a real LMCache, driven as an engine drives them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.offload.base import BlobKind, Completion, Metadata, Span, Transfer
from atoll.offload.base_worker import Regions, record_fence
from atoll.offload.lmcache import LMCacheConnector, make_lmcache
from atoll.offload.lmcache_store import LMCacheStore
from atoll.offload.lmcache_worker import LMCacheWorker

NUM_PAGES, PAGE_BYTES, IMAGE_PAGES = 64, 8192, 3
KV, STATE = BlobKind.KV, BlobKind.STATE


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page(number: int, at: int) -> Span:
    return Span(KV, digest(number), (at,))


def state(number: int, *at: int) -> Span:
    return Span(STATE, digest(number), at)


@dataclass
class Pool:
    """Both sides and a plain buffer, driven as an engine drives them."""

    connector: LMCacheConnector
    worker: LMCacheWorker
    store: LMCacheStore
    pages: torch.Tensor
    generation: int = 0
    told: list[Completion] = field(default_factory=list)

    def fill(self, value: int, *pages: int) -> None:
        for at in pages:
            self.pages[at] = torch.arange(PAGE_BYTES, device=self.pages.device).add(value * 7 + at).to(torch.uint8)

    def keep(self, *spans: Span) -> Completion | None:
        """Store, to the end; None: nothing was taken."""
        self.generation += 1
        if self.connector.prepare_store(Transfer(self.generation, spans)) is None:
            return None
        self.step()
        return self.end(self.generation)

    def fetch(self, *spans: Span) -> Completion | None:
        self.generation += 1
        if not self.connector.after_allocation(Transfer(self.generation, spans)):
            return None
        self.step()
        return self.end(self.generation)

    def step(self) -> Metadata:
        metadata = self.connector.build_metadata(self.generation, ())
        self.worker.run(metadata, record_fence(self.generation, self.pages.device))
        return metadata

    def end(self, generation: int) -> Completion:
        for _ in range(600):
            self.told += self.connector.complete(self.worker.poll())
            for completion in self.told:
                if completion.generation == generation:
                    self.told.remove(completion)
                    return completion
            self.worker.wait(0.1)
        raise AssertionError(f"transfer {generation} has not ended")


def write_config(folder: Path, cpu_bytes: int, disk_bytes: int = 0, **options: Any) -> str:
    """A configuration of LMCache; its disk is in the folder too."""
    lines = {"max_local_cpu_size": cpu_bytes / 2**30, "local_cpu": True} | options
    if disk_bytes:
        lines |= {"local_disk": str(folder / "disk"), "max_local_disk_size": disk_bytes / 2**30}
    path = folder / "lmcache.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    return str(path)


class Pools:
    """Makes pools over one LMCache each, and closes them."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._made: list[Pool] = []

    def make(self, cpu_bytes: int = 2**20, disk_bytes: int = 0, **options: Any) -> Pool:
        path = write_config(self._folder, cpu_bytes, disk_bytes, **options)
        pages = torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, device=self._device)
        connector, worker = make_lmcache(path, "tests", self._device)
        assert isinstance(connector, LMCacheConnector) and isinstance(worker, LMCacheWorker)
        worker.register(Regions(pages, IMAGE_PAGES))
        self._made.append(Pool(connector, worker, connector._store, pages))
        return self._made[-1]

    def close(self) -> None:
        for pool in self._made:
            pool.worker.close(10.0)
