"""What requests fetch from a connector before they run, and what they leave with it; knows no tensor, no tier and no policy of admission.

A load is a prefetch into the prefix cache: once its pages are in the tree, the request is admitted as any other. `atoll.offload.base` is the contract.
"""

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.errors import counted
from atoll.kv.checkpoint import Checkpoint
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_match import Match
from atoll.kv.prefix_tree import PrefixNode
from atoll.offload.base import BlobKind, Completion, Connector, Span, Transfer

if TYPE_CHECKING:
    from atoll.engine.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetch:
    """What would have to be loaded for a waiting request."""

    held: list[int]  # pages of the tree before the first that is missing, or before the state
    num_idle: int  # of them, those that nobody holds yet
    digests: list[bytes]  # of the pages that are missing
    num_pages: int  # from the sequence's beginning to the boundary that is reached
    needs_state: bool

    def num_new_pages(self, image_pages: int) -> int:
        return len(self.digests) + (image_pages if self.needs_state else 0)


@dataclass(eq=False)
class _Load:
    """A load in flight, and those who wait for it."""

    transfer: Transfer
    fetch: Fetch
    root: bytes
    digests: list[bytes]  # of all pages up to the boundary
    began_s: float
    requests: list["Request"] = field(default_factory=list)


@dataclass(eq=False)
class _Store:
    """A store that has not ended."""

    request_id: int
    checkpoints: list[Checkpoint]  # pinned, for the states among what is stored
    began_s: float
    lease: "_Lease | None" = None  # None: the request still holds the pages


@dataclass(eq=False)
class _Lease:
    """The pages of a request that has gone, held until its stores have ended."""

    pages: list[int]
    generations: set[int]
    began_s: float


class Offloader:
    """Joins the prefix cache to a connector. Called by the scheduler alone."""

    def __init__(
        self, connector: Connector, cache: PrefixCache, page_size: int, *, timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.connector = connector
        self.cache = cache
        self.timeout_s = timeout_s  # that a request waits for a load, and that others wait for the pages of a store
        self._page_size = page_size
        self._clock = clock
        self._generations = itertools.count(1)
        self._loads: dict[int, _Load] = {}
        self._loading: dict[tuple[BlobKind, bytes], _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._leases: list[_Lease] = []
        self._was_stuck = False  # and it was said
        # By request: what its last step has left, not offered yet; for a state its checkpoint.
        self._noted: defaultdict[int, dict[Span, Checkpoint | None]] = defaultdict(dict)

    @property
    def num_parked(self) -> int:
        """Requests that wait for a load."""
        return sum(len(load.requests) for load in self._loads.values())

    @property
    def parked(self) -> "list[Request]":
        return [request for load in self._loads.values() for request in load.requests]

    @property
    def in_flight(self) -> bool:
        """Whether a page of the pool is leased, or a store is due."""
        return bool(self._loads or self._stores)

    @property
    def is_stuck(self) -> bool:
        """Whether a transfer takes longer than is waited for. Then none begins: it might end as little, and its pages are leased until it has."""
        # The oldest come first.
        oldest = [next(iter(self._loads.values()), None), next(iter(self._stores.values()), None)]
        return any(one is not None and self._clock() - one.began_s >= self.timeout_s for one in oldest)

    @property
    def frees_pages(self) -> bool:
        """Whether pages in flight come back soon, without anybody's being preempted."""
        now_s = self._clock()
        return any(
            now_s - began_s < self.timeout_s for began_s in [*(lease.began_s for lease in self._leases), *(load.began_s for load in self._loads.values())]
        )

    # Loads.

    def look_up(self, request: "Request", match: Match) -> "Fetch | _Load | None":
        """What would make more of a request's tokens usable than `match`; or a load in flight that brings some of it; None: nothing does."""
        use = request.prefix
        if use.has_fetched or not self.cache.enabled or request.params.prompt_logprobs is not None or self.is_stuck:
            return None
        num_resident = len(match.resident)
        digests = use.digests[: (request.num_tokens - 1) // self._page_size]
        found = self.connector.lookup(digests, num_resident)
        reach = num_resident + found.num_pages
        if match.next_digest is not None and (load := self._loading.get((BlobKind.KV, match.next_digest))) is not None:
            return load
        if self.cache.image_pages:
            reach = max((number for number in found.states if number <= reach), default=0)
        if reach * self._page_size <= match.num_tokens:
            return None
        if (load := self._loading.get((BlobKind.STATE, digests[reach - 1]))) is not None:
            return load
        held = [node.page for node in match.resident[:reach]]
        num_idle = max(0, len(held) - match.num_held)
        return Fetch(held, num_idle, digests[len(held) : reach], reach, needs_state=self.cache.image_pages > 0)

    def begin(self, request: "Request", fetch: "Fetch | _Load", match: Match) -> bool:
        """Park a request on a load in flight, or on one that starts with the next metadata; False: the connector has not got it any more."""
        use, digests = request.prefix, request.prefix.digests
        if use.fetch_base is None:
            use.fetch_base = match.num_tokens
        if isinstance(fetch, _Load):
            fetch.requests.append(request)
            return True
        digests = digests[: fetch.num_pages]
        use.has_fetched = True
        self.cache.hold(fetch.held)
        pages = self.cache.allocate_leased(fetch.num_new_pages(self.cache.image_pages))
        num_kv = len(fetch.digests)
        spans = [Span(BlobKind.KV, digest, (page,)) for digest, page in zip(fetch.digests, pages[:num_kv], strict=True)]
        if fetch.needs_state:
            spans.append(Span(BlobKind.STATE, digests[-1], tuple(pages[num_kv:])))
        load = _Load(Transfer(next(self._generations), tuple(spans)), fetch, use.root, digests, self._clock(), [request])
        if not self.connector.after_allocation(load.transfer):
            self._give_up(load)
            return False
        self._loads[load.transfer.generation] = load
        self._loading.update(((span.kind, span.digest), load) for span in spans)
        return True

    def leave(self, request: "Request") -> None:
        """Take a parked request off its load, which goes on for others, or ends by itself."""
        for load in list(self._loads.values()):
            if request in load.requests:
                load.requests.remove(request)
                self._cancel_unwanted(load)

    def expire(self) -> "list[Request]":
        """Those whose load takes too long, and who go on without it."""
        now_s, given_up = self._clock(), []
        for load in list(self._loads.values()):
            if load.requests and now_s - load.began_s >= self.timeout_s:
                for request in load.requests:
                    request.prefix.has_fetched = True
                given_up += load.requests
                load.requests = []
                self._cancel_unwanted(load)
        self._tell_of_stuck()
        return given_up

    def _tell_of_stuck(self) -> None:
        was_stuck, self._was_stuck = self._was_stuck, self.is_stuck
        if self._was_stuck and not was_stuck:
            log.warning(
                "%s in flight, the oldest for more than %.1f s (--offload-timeout-s): until they have ended their pages are leased, and nothing else is "
                "offloaded or fetched",
                counted(len(self._loads) + len(self._stores), "transfer"),
                self.timeout_s,
            )
        elif was_stuck and not self._was_stuck:
            log.info("the transfers that hung have ended; pages are offloaded and fetched again")

    def complete(self, completions: Sequence[Completion]) -> "list[Request]":
        """Take the workers' reports; the requests that wait no more."""
        freed: list[Request] = []
        for completion in self.connector.complete(completions):
            load = self._loads.pop(completion.generation, None)
            if load is not None:
                freed += load.requests
                self._adopt(load, completion.arrived)
            elif completion.generation in self._stores:
                self._end_store(completion.generation)
        return freed

    def _cancel_unwanted(self, load: _Load) -> None:
        if not load.requests and self.connector.cancel(load.transfer.generation):
            del self._loads[load.transfer.generation]
            self._give_up(load)

    def _give_up(self, load: _Load) -> None:
        self._adopt(load, (False,) * len(load.transfer.spans))

    def _adopt(self, load: _Load, arrived: Sequence[bool]) -> None:
        """Put what arrived without a gap into the tree, and free the rest."""
        fetch, spans = load.fetch, load.transfer.spans
        for span in spans:
            self._loading.pop((span.kind, span.digest), None)
        num_kv = len(fetch.digests)
        num_good = next((number for number in range(num_kv) if not arrived[number]), num_kv)
        # Row by row of what the sequence has: its pages so far, then what came.
        pages = [*fetch.held, *(span.pages[0] for span in spans[:num_good])]
        self.cache.ledger.adopt(pages[len(fetch.held) :])
        brought: set[PrefixNode | Checkpoint] = {*self.cache.index(load.root, load.digests, pages, len(fetch.held), len(pages))}
        rest = [page for span in spans[num_good:num_kv] for page in span.pages]
        if fetch.needs_state and num_good == num_kv and arrived[-1]:
            brought.add(self.cache.adopt_image(load.digests[-1], fetch.num_pages * self._page_size, spans[-1].pages))
        elif fetch.needs_state:
            rest += spans[-1].pages
        self.cache.ledger.release_leased(rest)
        self.cache.release(pages)
        for request in load.requests:
            request.prefix.brought |= brought

    # Stores.

    def note_pages(self, request: "Request", first: int, end: int) -> None:
        """Pages `first` to `end` of a request have been filled and named."""
        numbered = zip(request.prefix.digests[first:end], request.pages[first:end], strict=True)
        self._noted[request.request_id].update((Span(BlobKind.KV, digest, (page,)), None) for digest, page in numbered)

    def note_state(self, request: "Request", checkpoint: Checkpoint) -> None:
        """A request has published a checkpoint that is worth keeping beyond the pool."""
        self._noted[request.request_id][Span(BlobKind.STATE, checkpoint.digest, checkpoint.pages)] = checkpoint

    def note_all(self, request: "Request") -> None:
        """A request ends: whatever of it is in the pool is offered once more, since the connector may have refused some, or given it up since.

        Each state behind its own page: of a connector that is soon full, what fits is a prefix that can be used.
        """
        pages = request.pages[: request.prefix.num_indexed]
        for number, checkpoint in enumerate(self.cache.checkpoints(pages)):
            self.note_pages(request, number, number + 1)
            if checkpoint is not None:
                self.note_state(request, checkpoint)

    def offer(self, request: "Request") -> None:
        """Have the connector take what it wants of what was noted."""
        noted = self._noted.pop(request.request_id, {})
        # A checkpoint may have been evicted since.
        spans = tuple(span for span, checkpoint in noted.items() if checkpoint is None or checkpoint.is_published)
        taken = self.connector.prepare_store(Transfer(next(self._generations), spans)) if spans and not self.is_stuck else None
        if taken is None:
            return
        checkpoints = [checkpoint for span in taken.spans if (checkpoint := noted[span]) is not None]
        for checkpoint in checkpoints:
            self.cache.pin(checkpoint)
        self._stores[taken.generation] = _Store(request.request_id, checkpoints, self._clock())

    def keep(self, request: "Request", *, discard: bool) -> bool:
        """A request stops running. True: its pages are leased to its stores, and are given back when these have ended.

        `discard`: what it computed is not to be kept anywhere.
        """
        if discard:
            self._noted.pop(request.request_id, None)
            self.connector.forget(request.prefix.digests)
        else:
            rolling = request.prefix.rolling
            if rolling is not None and rolling.is_published and rolling.position <= request.num_computed:
                # Only the last one is worth a copy: those before it have been replaced.
                self.note_state(request, rolling)
            self.offer(request)
        generations = {generation for generation, store in self._stores.items() if store.request_id == request.request_id and store.lease is None}
        for generation in list(generations) if discard else []:
            if self.connector.cancel(generation):
                generations.discard(generation)
                self._end_store(generation)
        is_leased = self.connector.request_finished(request.prefix.digests, sorted(generations))
        if not (is_leased and generations):
            for generation in generations:
                self._end_store(generation)
            return False
        lease = _Lease(request.pages, generations, self._clock())
        self._leases.append(lease)
        for generation in generations:
            self._stores[generation].lease = lease
        return True

    def _end_store(self, generation: int) -> None:
        store = self._stores.pop(generation)
        for checkpoint in store.checkpoints:
            self.cache.unpin(checkpoint, hit=False)
        if store.lease is None:
            return
        store.lease.generations.discard(generation)
        if not store.lease.generations:
            self._leases.remove(store.lease)
            self.cache.release(store.lease.pages)

    # Books.

    def held_pages(self) -> Iterator[int]:
        """Every page, once for each reference that loads and leases hold."""
        for load in self._loads.values():
            yield from load.fetch.held
            yield from load.transfer.pages
        for lease in self._leases:
            yield from lease.pages

    def leases(self) -> Counter[int]:
        """How often each page is held by requests that have gone."""
        return Counter(page for lease in self._leases for page in lease.pages)

    def pins(self) -> Counter[Checkpoint]:
        return Counter(checkpoint for store in self._stores.values() for checkpoint in store.checkpoints)
