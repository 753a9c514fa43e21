"""What a request takes from the prefix cache as it is admitted, and leaves in it as it runs; knows no budget, no tensor and no text."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.engine.offloader import Offloader
from atoll.engine.placement import Placement
from atoll.engine.step import StateCopy, Step
from atoll.kv.checkpoint import Checkpoint
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_match import NO_MATCH, Match
from atoll.kv.prefix_stats import MissReason
from atoll.kv.prefix_tree import PrefixNode, page_digest, root_digest

if TYPE_CHECKING:
    from atoll.engine.request import Request


@dataclass(eq=False)
class PrefixUse:
    """One request's part in the prefix cache."""

    root: bytes  # the name of the empty prefix under the request's salt
    digests: list[bytes] = field(default_factory=list)  # of its full pages, as far as they were needed yet
    num_indexed: int = 0  # of its pages, those that are the tree's too
    wanted: list[int] = field(default_factory=list)  # boundaries ahead at which its prefill pauses
    match: Match = NO_MATCH  # at its last admission
    restore: Checkpoint | None = None  # scheduled, not committed
    reserved: Checkpoint | None = None  # scheduled, not committed
    rolling: Checkpoint | None = None  # the last one that its next will replace
    num_cached_tokens: int | None = None  # reused at its first admission; None before that
    misses: Counter[MissReason] = field(default_factory=Counter)  # the other tokens of its prompt
    has_fetched: bool = False  # since it last ran: it had its one load, whatever came of it
    fetch_base: int | None = None  # tokens that were usable when it was first parked; None: it was not, since it last ran
    brought: set[PrefixNode | Checkpoint] = field(default_factory=set)  # by loads that it waited for
    num_fetched_tokens: int = 0  # of num_cached_tokens, those that a load brought

    @classmethod
    def of_salt(cls, salt: str | None) -> "PrefixUse":
        return cls(root_digest(salt))


class PrefixReuse:
    """Joins requests to the prefix cache.

    `look_up` changes nothing; `begin` with what it found, then `admit` or `release`; for each step `save` and `commit`; `release` whenever the request stops
    running, between a step and its commit as well.
    """

    def __init__(self, cache: PrefixCache, placement: Placement, page_size: int, offloader: Offloader | None = None) -> None:
        self.cache = cache
        self.offloader = offloader  # None: nothing is kept beyond the pool
        self._placement = placement
        self._page_size = page_size

    def look_up(self, request: "Request") -> Match:
        """The longest usable prefix of a waiting request; none where every token of the prompt is to be scored."""
        if not self.cache.enabled:
            return NO_MATCH
        self._name_pages(request, request.num_tokens // self._page_size)
        if request.params.prompt_logprobs is not None:
            return replace(NO_MATCH, misses=Counter({MissReason.SCORED: request.num_tokens}))
        return self.cache.match(request.prefix.digests, request.num_tokens)

    def begin(self, request: "Request", match: Match) -> None:
        """Give a waiting request the pages and the checkpoint of a match that was looked up just now, and decide where it is to leave checkpoints."""
        use = request.prefix
        self.cache.acquire(match)
        request.pages = list(match.pages)
        request.num_computed = match.num_tokens
        use.match, use.restore, use.num_indexed = match, match.checkpoint, len(match.pages)
        if self.cache.image_pages:
            use.wanted = self._placement.in_prefill(len(request.prompt_token_ids), request.num_tokens, match)
            for position in use.wanted:
                self.cache.expect(self._digest_at(use, position))

    def admit(self, request: "Request", step: Step) -> None:
        """Note that a request which has begun runs from this step on: its restore is due before its first row."""
        use, stats = request.prefix, self.cache.stats
        num_fetched = self._num_fetched(use)
        use.has_fetched, use.fetch_base, use.brought = False, None, set()
        if use.num_cached_tokens is not None:
            stats.num_resumed += use.match.num_tokens
        elif self.cache.enabled:
            use.num_cached_tokens, use.misses, use.num_fetched_tokens = use.match.num_tokens, use.match.misses, num_fetched
            stats.num_queries += request.num_tokens
            stats.num_hits += use.match.num_tokens
            stats.num_fetched += num_fetched
            stats.misses += use.misses
        if use.restore is not None:
            assert request.state_slot is not None
            step.restores.append(StateCopy(request.state_slot, use.restore.pages))

    def _num_fetched(self, use: PrefixUse) -> int:
        """Tokens that a request reuses by its loads' doing; others may have computed some of them meanwhile, or left a state that makes them usable."""
        if use.match.checkpoint is not None and use.match.checkpoint in use.brought:
            # It makes all of them usable, those too whose pages were here.
            return use.match.num_tokens - (use.fetch_base or 0)
        return sum(node in use.brought for node in use.match.resident[: len(use.match.pages)]) * self._page_size

    def save(self, running: list["Request"], step: Step) -> None:
        """Have states copied to images after the step's rows: those that are wanted, if they are worth the room, the most valuable first."""
        if not self.cache.image_pages:
            return
        requests = {request.request_id: request for request in running}
        found: list[tuple[float, Request, list[bytes]]] = []
        for row in step.rows:
            end = row.start + len(row.token_ids)
            request = requests[row.request_id]
            if end % self._page_size == 0 and (end in request.prefix.wanted or (end == request.num_tokens and self._placement.in_decode(end))):
                self._name_pages(request, end // self._page_size)
                digests = request.prefix.digests[: end // self._page_size]
                found.append((self.cache.worth(digests), request, digests))
        for _, request, digests in sorted(found, key=lambda one: -one[0]):
            request.prefix.reserved = checkpoint = self.cache.reserve(digests)
            if checkpoint is not None:
                assert request.state_slot is not None
                step.saves.append(StateCopy(request.state_slot, checkpoint.pages))

    def commit(self, request: "Request") -> None:
        """Note that a step has run: name the pages that it filled, publish what it saved, let go of what it restored."""
        use, num_full = request.prefix, request.num_computed // self._page_size
        if not self.cache.enabled:
            return
        if num_full > use.num_indexed:
            self._name_pages(request, num_full)
            self.cache.index(use.root, use.digests, request.pages, use.num_indexed, num_full)
            if self.offloader is not None:
                self.offloader.note_pages(request, use.num_indexed, num_full)
            use.num_indexed = num_full
        if use.restore is not None:
            self.cache.unpin(use.restore, hit=use.restore is not use.rolling)
            use.restore = None
        if use.reserved is not None:
            self._publish(request, use.reserved)
        while use.wanted and use.wanted[0] <= request.num_computed:
            self.cache.forget(self._digest_at(use, use.wanted.pop(0)))
        if self.offloader is not None:
            self.offloader.offer(request)

    def release(self, request: "Request", *, discard: bool = False) -> None:
        """Take back everything that a request holds; what it left stays in the cache, and with the connector, unless it is to be discarded."""
        use = request.prefix
        if use.reserved is not None:
            self.cache.cancel(use.reserved)
            use.reserved = None
        if use.restore is not None:
            self.cache.unpin(use.restore, hit=False)
            use.restore = None
        for position in use.wanted:
            self.cache.forget(self._digest_at(use, position))
        use.wanted = []
        use.num_indexed = 0
        pages = request.pages
        if self.offloader is None or not self.offloader.keep(request, discard=discard):
            self.cache.release(pages)
        if discard:
            self.cache.discard(pages, self.offloader.leases() if self.offloader is not None else {})
        request.pages = []
        request.num_computed = 0

    def _publish(self, request: "Request", checkpoint: Checkpoint) -> None:
        use = request.prefix
        use.reserved = None
        is_rolling = checkpoint.position not in use.wanted and not self._placement.is_rung(checkpoint.position)
        if not self.cache.publish(checkpoint):
            return
        if is_rolling:
            if use.rolling is not None:
                self.cache.replace(use.rolling)
            use.rolling = checkpoint
        elif self.offloader is not None:
            self.offloader.note_state(request, checkpoint)

    def _name_pages(self, request: "Request", count: int) -> None:
        digests = request.prefix.digests
        for number in range(len(digests), count):
            parent = digests[-1] if digests else request.prefix.root
            digests.append(page_digest(parent, request.tokens(number * self._page_size, self._page_size)))

    def _digest_at(self, use: PrefixUse, position: int) -> bytes:
        return use.digests[position // self._page_size - 1]
