"""A connector over a dict whose transfers move one page at a time and only when a test says so; a recorder sees that each touch of a page is in order.

The sides share nothing but what the protocol passes between them, and the recorder, which is no part of it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atoll import LLM
from atoll.engine.step import Step
from atoll.offload.base import BlobKind, Completion, ConnectorStats, Found, Metadata, Span, TierStats, Transfer
from atoll.offload.base_worker import Fence, Offload, Regions
from tests.offload.memories import Memory, TensorMemory
from tests.offload.paces import Outcome, Pace, all_arrives, at_once
from tests.offload.recorder import Recorder

Key = tuple[BlobKind, bytes]


@dataclass(eq=False)
class Flight:
    """A transfer on its way."""

    transfer: Transfer
    is_load: bool
    outcome: list[bool]  # for each span
    copies: deque[tuple[int, int, int]]  # still to come: number of the span, number of the page in it, page
    staged: list[list[Any]]  # of a store: what was read, by span and page
    num_polls: int = 0
    is_told: bool = False

    @property
    def generation(self) -> int:
        return self.transfer.generation


class SlowWorker:
    """The switches below are faults: each takes one protection away."""

    tells_early = False  # a completion comes before the copies
    tells_all_arrived = False  # of a load, whatever arrived
    reads_stale = False  # a store reads what its pages held before the step that filled them: it did not wait for the fence

    def __init__(self, recorder: Recorder, pace: Pace = at_once, outcome: Outcome = all_arrives) -> None:
        self.pace = pace
        self.outcome = outcome
        self.holds_loads = False  # all copies are made, but nothing is told until `release`
        self.holds_stores = False
        self.flights: list[Flight] = []
        self.blobs: dict[Key, tuple[Any, ...]] = {}  # what arrived here
        self.num_waits = 0
        self.is_closed = False
        self.regions: Regions | None = None
        self._memory: Memory | None = None
        self.recorder = recorder
        self._before: dict[int, Any] = {}  # page -> what it held before the last step, for reads_stale
        self._unfenced: list[Flight] = []

    @property
    def memory(self) -> Memory:
        assert self._memory is not None, "a worker is registered before anything else"
        return self._memory

    # The protocol.

    def register(self, regions: Regions) -> None:
        assert self.regions is None, "registered twice"
        self.regions = regions
        self.use(TensorMemory(regions.pages))

    def run(self, metadata: Metadata, fence: Fence) -> None:
        assert not self.is_closed and fence.number == metadata.fence
        self.recorder.fenced(fence.number, [*metadata.loads, *metadata.stores])
        for transfer in metadata.loads:
            if not any(flight.transfer is transfer for flight in self._unfenced):
                self.flights.append(self._flight(transfer, True))
        self.flights += self._unfenced
        self._unfenced = []
        self.flights += [self._flight(transfer, False) for transfer in metadata.stores]
        self.pace(self, False)

    def poll(self) -> list[Completion]:
        for flight in self.flights:
            flight.num_polls += 1
        self.pace(self, True)
        told = [flight for flight in self.flights if self._is_due(flight)]
        for flight in told:
            flight.is_told = True
            self.recorder.told(flight.generation, early=bool(flight.copies))
        self.flights = [flight for flight in self.flights if flight.copies or not flight.is_told]
        return [self._completion(flight) for flight in told]

    def wait(self, timeout_s: float) -> None:
        """Not at all: time passes by polls."""
        assert 0 <= timeout_s < 60
        self.num_waits += 1

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self.flights = []

    # For tests.

    def use(self, memory: Memory) -> None:
        self._memory = memory

    def flight(self, generation: int) -> Flight:
        [found] = [flight for flight in self.flights if flight.generation == generation]
        return found

    @property
    def loads(self) -> list[Flight]:
        return [flight for flight in self.flights if flight.is_load]

    @property
    def stores(self) -> list[Flight]:
        return [flight for flight in self.flights if not flight.is_load]

    def advance(self, flight: Flight, count: int | None = None, *, backwards: bool = False) -> None:
        """Make the next `count` copies of a flight; None: all that are left."""
        for _ in range(len(flight.copies) if count is None else min(count, len(flight.copies))):
            self._copy(flight, *(flight.copies.pop() if backwards else flight.copies.popleft()))

    def release(self) -> None:
        """Go on at once, and tell whatever was held."""
        self.holds_loads = self.holds_stores = False
        self.pace = at_once

    def start_unfenced(self, transfer: Transfer) -> None:
        """Read a load before anybody has recorded its fence."""
        flight = self._flight(transfer, True)
        self.advance(flight)
        self._unfenced.append(flight)

    def remember(self, num_pages: int) -> None:
        """Note what all pages hold, before a step's rows are computed."""
        self._before = {page: self.memory.read(page) for page in range(num_pages)}

    def _flight(self, transfer: Transfer, is_load: bool) -> Flight:
        copies = deque((number, part, page) for number, span in enumerate(transfer.spans) for part, page in enumerate(span.pages))
        flight = Flight(transfer, is_load, list(self.outcome(transfer, is_load)), copies, [[None] * len(span.pages) for span in transfer.spans])
        assert len(flight.outcome) == len(transfer.spans) > 0
        # What the store is to read, if it reads before the fence.
        if not is_load and self.reads_stale:
            flight.staged = [[self._before[page] for page in span.pages] for span in transfer.spans]
        return flight

    def _copy(self, flight: Flight, number: int, part: int, page: int) -> None:
        span = flight.transfer.spans[number]
        self.recorder.copied(flight.generation, page)
        if not flight.is_load:
            if not self.reads_stale:
                flight.staged[number][part] = self.memory.read(page)
            if not flight.copies:
                for arrived, stored, pages in zip(flight.outcome, flight.transfer.spans, flight.staged, strict=True):
                    if arrived:
                        self.blobs[_key(stored)] = tuple(pages)
            return
        blob = self.blobs.get(_key(span))
        flight.outcome[number] = flight.outcome[number] and blob is not None
        if blob is not None and flight.outcome[number]:
            self.memory.write(page, blob[part])
        else:
            self.memory.spoil(page)

    def _is_due(self, flight: Flight) -> bool:
        held = self.holds_loads if flight.is_load else self.holds_stores
        return not held and not flight.is_told and (not flight.copies or self.tells_early)

    def _completion(self, flight: Flight) -> Completion:
        arrived = [True] * len(flight.outcome) if self.tells_all_arrived and flight.is_load else flight.outcome
        num_pages = sum(len(span.pages) for span, came in zip(flight.transfer.spans, arrived, strict=True) if came)
        return Completion(flight.generation, tuple(arrived), float(flight.num_polls), num_pages, None if all(arrived) else "the test said so")


class SlowConnector:
    """Knows by digest what its worker keeps. The switches are faults, as its worker's."""

    cancels_in_flight = False  # `cancel` gives the pages of a transfer back though it goes on
    forgets_leases = False  # `request_finished` gives pages back though stores still read them
    clears_late = False  # the clear of a load's target is held back until the load has ended
    starts_at_once = False  # a load does not wait for the fence
    tells_twice = False  # completions come again, and some that nobody asked for

    def __init__(self, recorder: Recorder, worker: SlowWorker) -> None:
        self.index: dict[Key, None] = {}
        self.pending: dict[int, tuple[Transfer, bool]] = {}  # accepted, not told to the worker; True: a load
        self.in_flight: dict[int, tuple[Transfer, bool]] = {}
        self.num_lookups = 0
        self.finished: list[tuple[tuple[bytes, ...], tuple[int, ...]]] = []
        self.forgotten: list[bytes] = []
        self.metadata: list[Metadata] = []
        self.takes: Callable[[Transfer, Span | None], bool] = lambda transfer, span: True  # a store's span, or a load (None) whose blobs are still there
        self.num_lost_loads = 0
        self.num_lost_stores = 0
        self._recorder = recorder
        self._worker = worker  # for starts_at_once alone
        self._generations: set[int] = set()
        self._clears: list[int] = []
        self._dropped: set[Key] = set()  # forgotten while in flight

    @property
    def known(self) -> dict[int, tuple[Transfer, bool]]:
        return self.pending | self.in_flight

    def lookup(self, digests: Sequence[bytes], first: int) -> Found:
        self.num_lookups += 1
        assert 0 <= first <= len(digests)
        wanted = digests[first:]
        num_pages = next((number for number, digest in enumerate(wanted) if (BlobKind.KV, digest) not in self.index), len(wanted))
        return Found(num_pages, frozenset(number for number, digest in enumerate(digests, 1) if (BlobKind.STATE, digest) in self.index))

    def after_allocation(self, load: Transfer) -> bool:
        if not self.takes(load, None):
            return False
        assert load.spans and all(_key(span) in self.index for span in load.spans), "the engine loads what a look-up has found"
        kinds = [span.kind for span in load.spans]
        assert kinds == sorted(kinds) and kinds.count(BlobKind.STATE) <= 1, "KV pages first, then the state"
        self._accept(load, True)
        if self.starts_at_once:
            self._worker.start_unfenced(load)
        return True

    def prepare_store(self, store: Transfer) -> Transfer | None:
        busy = {_key(span) for transfer, is_load in self.known.values() if not is_load for span in transfer.spans}
        spans = tuple(span for span in store.spans if _key(span) not in self.index and _key(span) not in busy and self.takes(store, span))
        if not spans:
            return None
        store = replace(store, spans=spans, note=("slow", len(spans)))
        self._accept(store, False)
        return store

    def build_metadata(self, fence: int, clears: Sequence[int]) -> Metadata:
        self.in_flight |= self.pending
        loads, stores = (tuple(transfer for transfer, is_load in self.pending.values() if is_load == wanted) for wanted in (True, False))
        self.pending = {}
        self._clears += clears
        held = {page for transfer, is_load in self.in_flight.values() if is_load for page in transfer.pages} if self.clears_late else set[int]()
        now = tuple(page for page in self._clears if page not in held)
        self._clears = [page for page in self._clears if page in held]
        self.metadata.append(Metadata(fence, now, loads, stores))
        return self.metadata[-1]

    def complete(self, completions: Sequence[Completion]) -> list[Completion]:
        ended = []
        for completion in completions:
            transfer, is_load = self.in_flight.pop(completion.generation)
            for span, arrived in zip(transfer.spans, completion.arrived, strict=True):
                if not is_load and arrived and _key(span) not in self._dropped:
                    self.index[_key(span)] = None
                if is_load and not arrived:
                    self.index.pop(_key(span), None)
                self._dropped.discard(_key(span))
            self.num_lost_loads += is_load and not completion.ok
            self.num_lost_stores += not is_load and not completion.ok
            ended.append(completion)
        if self.tells_twice:
            ended += [*ended, Completion(10**9, (True,)), Completion(10**9 + 1, ())]
        return ended

    def request_finished(self, digests: Sequence[bytes], generations: Sequence[int]) -> bool:
        self.finished.append((tuple(digests), tuple(generations)))
        assert len(set(generations)) == len(generations)
        busy = any(generation in self.known for generation in generations)
        assert busy == all(generation in self.known for generation in generations) or not generations, "a store that ended is named"
        return busy and not self.forgets_leases

    def cancel(self, generation: int) -> bool:
        if generation in self.pending:
            del self.pending[generation]
            self._recorder.ended(generation)
            return True
        return self.cancels_in_flight

    def forget(self, digests: Sequence[bytes]) -> None:
        self.forgotten += digests
        busy = {_key(span) for transfer, is_load in self.known.values() if not is_load for span in transfer.spans}
        for digest in digests:
            for kind in BlobKind:
                self.index.pop((kind, digest), None)
                if (kind, digest) in busy:
                    self._dropped.add((kind, digest))

    @property
    def has_pending_work(self) -> bool:
        return bool(self.pending or self.in_flight or self._clears)

    def reset(self) -> None:
        self.drop([*self.index])

    @property
    def stats(self) -> ConnectorStats:
        tier = TierStats("slow", len(self.index), 10**9, len(self.index))
        return ConnectorStats(num_load_failures=self.num_lost_loads, num_store_failures=self.num_lost_stores, tiers=(tier,))

    @property
    def metadata_with_loads(self) -> list[Metadata]:
        return [metadata for metadata in self.metadata if metadata.loads]

    def drop(self, keys: Iterable[Key]) -> None:
        """Evict blobs, but for those that are being loaded."""
        busy = {_key(span) for transfer, is_load in self.known.values() if is_load for span in transfer.spans}
        for key in keys:
            if key not in busy:
                self.index.pop(key, None)

    def _accept(self, transfer: Transfer, is_load: bool) -> None:
        assert transfer.generation > 0 and transfer.generation not in self._generations, f"generation {transfer.generation} is used again"
        self._generations.add(transfer.generation)
        assert len(set(transfer.pages)) == len(transfer.pages) and 0 not in transfer.pages
        self.pending[transfer.generation] = transfer, is_load
        self._recorder.leased(transfer, is_load)


def _key(span: Span) -> Key:
    return span.kind, span.digest


@dataclass
class Slow:
    """Both sides and their recorder."""

    pace: Pace = at_once
    outcome: Outcome = all_arrives
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.worker = SlowWorker(self.recorder, self.pace, self.outcome)
        self.connector = SlowConnector(self.recorder, self.worker)

    @property
    def offload(self) -> Offload:
        return Offload(self.connector, self.worker)

    def watch(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record whatever else touches a page of an engine, and let `reads_stale` know what pages held before each step."""
        self.recorder.attach(llm, monkeypatch)
        run_rows = llm.engine.runner._run_rows

        def remembering(step: Step) -> Any:
            if self.worker.reads_stale:
                self.worker.remember(llm.engine.pool.num_pages)
            return run_rows(step)

        monkeypatch.setattr(llm.engine.runner, "_run_rows", remembering)

    def counts(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.recorder.events)
