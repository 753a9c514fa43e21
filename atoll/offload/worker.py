"""The tiers' worker: moves pages between the pool and host pages, and hands the files' moves on; knows no request, and no blob's name.

What it is told beside the protocol is in `atoll.offload.host_pages`. On a GPU everything is issued by the caller's thread, and no call but `wait` and `close`
waits for the device.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.offload.base import Completion, Metadata, Transfer
from atoll.offload.base_worker import Fence, Regions
from atoll.offload.copier import Copier, Copy, ThreadCopier, Way
from atoll.offload.disk import FileThreads
from atoll.offload.driver import load_driver
from atoll.offload.host_pages import HostPages
from atoll.offload.runs import make_runs
from atoll.offload.stream_copier import LOOK_S, Issue, StreamCopier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    """Transfers that one copy moves."""

    copy: Copy
    transfers: Sequence[Transfer]
    num_pages: int


class TierWorker:
    """The worker side of the tiers: one buffer of host pages, and threads for the files where a tier is one."""

    def __init__(self, host_pages: HostPages, files: FileThreads | None = None, *, issue: Issue = "auto") -> None:
        self._host_pages = host_pages
        self._files = files
        self._issue: Issue = issue
        self._regions: Regions | None = None
        self._copier: Copier | None = None
        self._in_flight: dict[Way, deque[_InFlight]] = {way: deque() for way in Way}

    def register(self, regions: Regions) -> None:
        host = self._host_pages
        if regions.page_bytes != host.page_bytes:
            raise ConfigError(f"the pool's pages have {regions.page_bytes} bytes, host pages {host.page_bytes}; make both for one layout")
        if not regions.pages.is_contiguous():
            raise ConfigError(f"the pool's buffer has strides {regions.pages.stride()}, pages must lie one behind the other; pass the whole buffer")
        self._regions = regions
        if regions.device.type == "cuda":
            host.pin()
            self._copier = StreamCopier(regions.pages, host.pages, load_driver(), self._issue, is_pinned=host.is_pinned)
        else:
            self._copier = ThreadCopier(regions.pages, host.pages)

    def run(self, metadata: Metadata, fence: Fence) -> None:
        if self._files is not None and metadata.note is not None:
            assert isinstance(metadata.note, tuple)
            # First, so that a record is soon void which other bytes come to lie under. Until it is, its checksum tells that they are others.
            self._files.submit(metadata.note)
        # A request waits for each load, so each tells of itself; nobody waits for a store, and few copies cost less than many.
        for load in metadata.loads:
            self._start(Way.LOAD, [load], fence)
        if metadata.stores:
            self._start(Way.STORE, metadata.stores, fence)

    def poll(self) -> list[Completion]:
        completions: list[Completion] = []
        for way, flights in self._in_flight.items():
            # In order: behind one that has not ended none has.
            while flights and flights[0].copy.has_ended():
                flight = flights.popleft()
                if way is Way.LOAD:
                    self._ready_copier.order_behind(flight.copy)
                completions += self._complete(flight)
        return completions if self._files is None else completions + self._files.poll()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._num_in_flight and not self._has_news and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        has_ended = self._copier is None or self._copier.close(timeout_s)
        if has_ended:
            if self._files is not None:
                self._files.close(max(0.0, deadline - time.monotonic()))
            # Whoever holds a view of the memory keeps it.
            self._copier = None
            for flights in self._in_flight.values():
                flights.clear()
            self._host_pages.close()
        else:
            # Memory that a copy still reads or writes must stay, and a mapped file locked, so that no other engine has it; they go with the process.
            log.warning("copies of pages have not ended within %.1f s; the host tier's memory and files stay until the process ends", timeout_s)

    @property
    def _ready_copier(self) -> Copier:
        assert self._copier is not None, "register comes first"
        return self._copier

    @property
    def _num_in_flight(self) -> int:
        return sum(map(len, self._in_flight.values())) + (self._files.num_in_flight if self._files is not None else 0)

    @property
    def _has_news(self) -> bool:
        return any(flights and flights[0].copy.has_ended() for flights in self._in_flight.values()) or (self._files is not None and self._files.done.is_set())

    def _start(self, way: Way, transfers: Sequence[Transfer], fence: Fence) -> None:
        assert self._regions is not None, "register comes first"
        pages: list[int] = []
        slots: list[int] = []
        for transfer in transfers:
            assert isinstance(transfer.note, tuple), "the note of a transfer names its host slots"
            pages += transfer.pages
            slots += transfer.note
        runs = make_runs(pages, slots)
        # Addresses are made of these. The null page is never moved.
        assert min(pages) > 0 and max(pages) < len(self._regions.pages), f"pages {min(pages)} to {max(pages)} are not all of the pool's"
        assert min(slots) >= 0 and max(slots) < self._host_pages.num_pages, f"slots {min(slots)} to {max(slots)} are not all of the host tier's"
        self._in_flight[way].append(_InFlight(self._ready_copier.start(way, runs, fence), transfers, len(pages)))

    def _complete(self, flight: _InFlight) -> list[Completion]:
        error, seconds = flight.copy.error, flight.copy.seconds
        completions = []
        for transfer in flight.transfers:
            num_pages = len(transfer.pages)
            arrived, num_bytes = (error is None,) * len(transfer.spans), 0 if error is not None else num_pages * self._host_pages.page_bytes
            completions.append(Completion(transfer.generation, arrived, seconds * num_pages / flight.num_pages, num_bytes, error))
        return completions
