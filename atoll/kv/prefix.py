"""The prefix cache: which prefixes are computed and still in the pool, what of one can be used, what is evicted; knows no tensor and no request."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from atoll.errors import PoolCorruptError, PoolError
from atoll.kv.checkpoint import Checkpoint
from atoll.kv.eviction import EvictionQueue
from atoll.kv.ledger import PageClass, PageLedger
from atoll.kv.page_map import count_kinds
from atoll.kv.prefix_match import Match
from atoll.kv.prefix_stats import MissReason, PrefixStats, remember
from atoll.kv.prefix_tree import PrefixNode, PrefixTree, upward


class PrefixCache:
    """Keeps pages and states of prefixes while nothing needs their place. All pages of the pool are handed out and taken back here.

    Of each page in its tree it holds one reference, so a page is free only when neither a request nor the tree holds it. A page that only the tree holds can
    be evicted: the last of a chain first, so no page is left whose prefix is gone. `image_pages` > 0 says that the model keeps states. Then a prefix can be
    used only up to a checkpoint, pages without one at or after them are worth nothing and go first, and what is weighed is a checkpoint with the pages that
    only it needs:

        value = tokens computed again without it / pages that go with it (atoll.kv.eviction says what follows from a value)

    For a model without states every page saves page_size tokens. With `enabled` false nothing is kept.
    """

    def __init__(self, ledger: PageLedger, page_size: int, *, image_pages: int = 0, enabled: bool = True) -> None:
        self.ledger = ledger
        self.image_pages = image_pages  # pages of one state; 0: the model keeps none
        self.enabled = enabled
        self.stats = PrefixStats()
        self._page_size = page_size
        self._tree = PrefixTree()
        self._queue: EvictionQueue[PrefixNode | Checkpoint] = EvictionQueue()
        self._reserved: dict[bytes, Checkpoint] = {}  # not published yet
        self._expected: Counter[bytes] = Counter()  # boundaries at which running requests will leave a checkpoint
        self._detached: set[Checkpoint] = set()  # forgotten while they were pinned
        self._num_unpinned = 0  # published checkpoints
        self._gone_pages: dict[bytes, None] = {}  # evicted, in order
        self._gone_checkpoints: dict[bytes, None] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: those that are free, and those that can be evicted."""
        return self.ledger.num_free + self.num_evictable

    @property
    def num_evictable(self) -> int:
        return self._tree.num_idle + self._num_unpinned * self.image_pages

    @property
    def num_indexed_pages(self) -> int:
        return len(self._tree)

    # Pages of running requests.

    def allocate(self, num_pages: int) -> list[int]:
        """Pages for rows, evicting what it must. Raises OutOfPagesError, having evicted nothing, when fewer are available."""
        self._make_room(num_pages)
        return self.ledger.allocate(num_pages)

    def allocate_leased(self, num_pages: int) -> list[int]:
        """Pages for a load to write, as `allocate`."""
        self._make_room(num_pages)
        return self.ledger.allocate_leased(num_pages)

    def acquire(self, match: Match) -> None:
        """Hold a match's pages for a request and pin its checkpoint; `release` and `unpin` undo it."""
        self.hold(match.pages)
        if match.checkpoint is not None:
            self.pin(match.checkpoint)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages of the tree, the first ones of one sequence; `release` undoes it."""
        for page in pages:
            node = self._tree.of_page(page)
            assert node is not None, "nothing was evicted since the match"
            self._hold(node)

    def release(self, pages: Sequence[int]) -> None:
        """Take back a request's pages: free, or kept where the tree has them."""
        self.ledger.release(pages)
        for page in pages:
            node = self._tree.of_page(page)
            if node is not None and self.ledger.ref_count(page) == 1:
                self._tree.set_held(node, False)
                node.stamp = self._queue.stamp(0 if self.image_pages else self._page_size)
                self._offer(node)

    def discard(self, pages: Sequence[int], leases: Mapping[int, int]) -> None:
        """Forget a request's pages, from the last on, as far as nothing comes after them and nobody holds them but `leases`, so often; checkpoints too.

        The request has given its pages back. What a lease still holds is forgotten all the same, and is free when the lease ends.
        """
        for page in reversed(pages):
            node = self._tree.of_page(page)
            if node is None:
                continue
            if node.children or self.ledger.ref_count(page) > 1 + leases.get(page, 0):
                return
            if node.checkpoint is not None:
                self._drop(node.checkpoint)
            self._tree.set_held(node, False)
            self._queue.discard(node)
            self._remove(node)
            if self.ledger.ref_count(page):
                self.ledger.map.mark(page, PageClass.KV)

    # The tree.

    def match(self, digests: Sequence[bytes], num_tokens: int) -> Match:
        """What is usable of a sequence of `num_tokens`, of which one at least must be computed; `digests` names its full pages. Changes nothing."""
        chain: list[PrefixNode] = []
        for digest in digests:
            node = self._tree.get(digest)
            if node is None:
                break
            chain.append(node)
        misses: Counter[MissReason] = Counter()
        for digest in digests[len(chain) :]:
            misses[MissReason.EVICTED if digest in self._gone_pages else MissReason.NOT_INDEXED] += self._page_size
        misses[MissReason.NOT_INDEXED] += num_tokens - len(digests) * self._page_size
        while len(chain) * self._page_size >= num_tokens:
            chain.pop()
            misses[MissReason.LAST_TOKEN] += self._page_size
        resident, num_indexed = tuple(chain), len(chain) * self._page_size
        next_digest = digests[len(chain)] if num_indexed + self._page_size < num_tokens else None
        reason = MissReason.NO_CHECKPOINT
        while self.image_pages and chain and chain[-1].checkpoint is None:
            digest = chain.pop().digest
            if digest in self._expected:
                reason = MissReason.NOT_YET_COPIED
            elif digest in self._gone_checkpoints:
                reason = MissReason.EVICTED
            misses[reason] += self._page_size
        # Whoever holds a page holds those before it.
        num_held = bisect_left(resident, True, key=lambda node: not node.is_held)
        checkpoint = chain[-1].checkpoint if chain else None
        is_pinned = checkpoint is not None and checkpoint.num_pins > 0
        num_evictable = max(0, len(chain) - num_held) + (self.image_pages if checkpoint is not None and not is_pinned else 0)
        pages = [node.page for node in chain]
        return Match(len(chain) * self._page_size, pages, checkpoint, num_indexed, resident, num_held, next_digest, is_pinned, num_evictable, +misses)

    def stands(self, match: Match) -> bool:
        """Whether the same would be found again; see `Match.stands`."""
        return match.stands(self._tree)

    def index(self, root: bytes, digests: Sequence[bytes], pages: list[int], first: int, end: int) -> list[PrefixNode]:
        """Name a request's pages `first` to `end`, which are full of computed rows; those before are named. Returns what is new in the tree.

        Where the tree has a page of that name already, because two requests computed it at the same time or because the state had to be computed again, that
        page takes the place of the request's own in `pages`: so whoever holds a page of the tree holds its whole prefix, and no page stays because of a twin.
        """
        added = []
        for number in range(first, end):
            digest = digests[number]
            node = self._tree.get(digest)
            if node is not None:
                self._hold(node)
                self.ledger.release([pages[number]])
                pages[number] = node.page
                continue
            node = self._tree.insert(digests[number - 1] if number else root, digest, pages[number], first=not number)
            self.ledger.retain([node.page])
            self.ledger.map.mark(node.page, "indexed")
            if node.parent is not None:
                self._queue.discard(node.parent)
            self._gone_pages.pop(digest, None)
            added.append(node)
        return added

    # Checkpoints.

    def expect(self, digest: bytes) -> None:
        """Note that a running request will leave a checkpoint; `forget` when it has, or will not."""
        self._expected[digest] += 1

    def forget(self, digest: bytes) -> None:
        self._expected[digest] -= 1
        if not self._expected[digest]:
            del self._expected[digest]

    def checkpoints(self, pages: Sequence[int]) -> list[Checkpoint | None]:
        """For each of a request's indexed pages, the published checkpoint at its end."""
        return [node.checkpoint if node is not None else None for node in map(self._tree.of_page, pages)]

    def worth(self, digests: Sequence[bytes]) -> float:
        """Value of a state after the last of these pages; 0: there is one already, or about to be."""
        node = self._tree.get(digests[-1])
        if digests[-1] in self._reserved or (node is not None and node.checkpoint is not None):
            return 0
        return self._value(map(self._tree.get, reversed(digests)))

    def reserve(self, digests: Sequence[bytes]) -> Checkpoint | None:
        """Pages for the state after the last of these pages, evicting only what is worth no more.

        None: there is one already, or all that could be evicted is worth more.
        """
        worth = self.worth(digests)
        if not worth:
            return None
        # Pages that are worth nothing go first, and then one checkpoint is enough, since all images are of one size: none goes in vain.
        limit = self._queue.floor + worth
        while self.ledger.num_free < self.image_pages:
            if not self._evict(limit):
                self.stats.num_refused_checkpoints += 1
                return None
        checkpoint = Checkpoint(digests[-1], len(digests) * self._page_size, self.ledger.allocate_image(self.image_pages))
        self._reserved[checkpoint.digest] = checkpoint
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> bool:
        """Let matches find a checkpoint, whose copy is ordered before all that comes next. False: its page is not in the tree, and it is gone."""
        del self._reserved[checkpoint.digest]
        self.stats.num_saved_checkpoints += self._install(checkpoint)
        return checkpoint.is_published

    def adopt_image(self, digest: bytes, position: int, pages: Sequence[int]) -> Checkpoint:
        """Publish the state that a load brought, at the end of an indexed page, unless there is one already: then it is gone."""
        checkpoint = Checkpoint(digest, position, self.ledger.adopt_image(pages))
        self._install(checkpoint)
        return checkpoint

    def _install(self, checkpoint: Checkpoint) -> bool:
        node = self._tree.get(checkpoint.digest)
        if node is None or node.checkpoint is not None:
            self.ledger.release_image(checkpoint.pages)
            return False
        node.checkpoint = checkpoint
        checkpoint.is_published = True
        self._queue.discard(node)
        self._gone_checkpoints.pop(checkpoint.digest, None)
        self._num_unpinned += 1
        self._use(checkpoint)
        return True

    def cancel(self, checkpoint: Checkpoint) -> None:
        """Give back the pages of a checkpoint that is not published."""
        del self._reserved[checkpoint.digest]
        self.ledger.release_image(checkpoint.pages)

    def unpin(self, checkpoint: Checkpoint, *, hit: bool) -> None:
        """A restore has run, or will not; `hit`: it served another request than the one that left the checkpoint."""
        checkpoint.num_pins -= 1
        checkpoint.num_hits += hit
        if checkpoint in self._detached:
            if not checkpoint.num_pins:
                self._detached.discard(checkpoint)
                self.ledger.release_image(checkpoint.pages)
        elif not checkpoint.num_pins:
            self._num_unpinned += 1
            self._use(checkpoint)

    def replace(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint that its request has passed, unless another request used it, is about to, or it is gone already."""
        if checkpoint.is_published and not checkpoint.num_pins and not checkpoint.num_hits:
            self._drop(checkpoint)

    def reset(self) -> None:
        """Drop everything. Raises PoolError while a request holds pages."""
        num_busy = len(self._tree) - self._tree.num_idle + len(self._reserved)
        if num_busy:
            raise PoolError(f"{num_busy} pages and images of the prefix cache are in use, 0 is the limit for a reset; finish the requests first")
        for node in self._tree:
            if node.checkpoint is not None:
                node.checkpoint.is_published = False
                self.ledger.release_image(node.checkpoint.pages)
        self.ledger.release([node.page for node in self._tree])
        self._tree, self._queue, self._num_unpinned = PrefixTree(), EvictionQueue(), 0
        self._gone_pages.clear()
        self._gone_checkpoints.clear()

    # Books.

    def held_pages(self) -> Iterator[int]:
        """Every page, once for each reference that the cache holds."""
        for node in self._tree:
            yield node.page
            if node.checkpoint is not None:
                yield from node.checkpoint.pages
        for checkpoint in (*self._reserved.values(), *self._detached):
            yield from checkpoint.pages

    def check(self, pins: Mapping[Checkpoint, int], reserved: Collection[Checkpoint]) -> None:
        """Recount everything from scratch, given the restores and the checkpoints of the step that is scheduled and not committed.

        Raises PoolCorruptError at the first disagreement.
        """
        self._tree.check()
        num_shown = count_kinds(self.ledger.map.text())["indexed"]
        if num_shown != len(self._tree) or any(self.ledger.map.kind(node.page) != "indexed" for node in self._tree):
            raise PoolCorruptError(f"{num_shown} pages are indexed on the map, {len(self._tree)} are in the tree; whatever enters the tree is marked")
        checkpoints = [node.checkpoint for node in self._tree if node.checkpoint is not None]
        for node in self._tree:
            evictable = not (node.is_held or node.children or node.checkpoint)
            if (node in self._queue) != evictable or node.is_held != (self.ledger.ref_count(node.page) > 1):
                where = "in" if node in self._queue else "not in"
                raise PoolCorruptError(f"page {node.page} with {self.ledger.ref_count(node.page)} references is {where} the queue of what may be evicted")
            if node.checkpoint is not None and (node.checkpoint.digest, node.checkpoint.position) != (node.digest, node.depth * self._page_size):
                raise PoolCorruptError(f"page {node.page} at depth {node.depth} has a checkpoint of position {node.checkpoint.position}; it is another page's")
        for checkpoint in checkpoints:
            if not checkpoint.is_published or (checkpoint in self._queue) != (checkpoint.num_pins == 0):
                raise PoolCorruptError(f"checkpoint at {checkpoint.position} with {checkpoint.num_pins} pins is wrongly published or queued")
        for checkpoint in (*checkpoints, *self._detached):
            if checkpoint.num_pins != pins.get(checkpoint, 0):
                raise PoolCorruptError(f"checkpoint at {checkpoint.position} has {checkpoint.num_pins} pins, its readers count {pins.get(checkpoint, 0)}")
        unpinned = sum(checkpoint.num_pins == 0 for checkpoint in checkpoints)
        if unpinned != self._num_unpinned:
            raise PoolCorruptError(f"{self._num_unpinned} checkpoints are counted as evictable, {unpinned} are")
        if set(reserved) != set(self._reserved.values()) or any(checkpoint.is_published for checkpoint in reserved):
            raise PoolCorruptError(f"{len(self._reserved)} checkpoints are reserved, the step saves {len(reserved)}; one was neither published nor cancelled")

    # Eviction.

    def _make_room(self, num_pages: int) -> None:
        if num_pages <= self.num_available:
            while self.ledger.num_free < num_pages:
                evicted = self._evict()
                assert evicted, "pages that can be evicted were counted"

    def _evict(self, limit: float | None = None) -> bool:
        """Evict one page, or one image whole; False: nothing of a priority up to `limit` is left."""
        item = self._queue.pop(limit)
        if isinstance(item, Checkpoint):
            self.stats.num_evicted_checkpoints += 1
            self._drop(item)
            remember(self._gone_checkpoints, item.digest)
        elif item is not None:
            self.stats.num_evicted_pages += 1
            self._remove(item)
            remember(self._gone_pages, item.digest)
        return item is not None

    def _remove(self, node: PrefixNode) -> None:
        """Take the last page of a chain out of the tree, and free it; the page before it may be the next to go."""
        parent = node.parent
        self._tree.remove(node)
        self.ledger.release([node.page])
        if parent is not None and parent.depth:
            self._offer(parent)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out, and free its image; that of a pinned one, which is only ever discarded, when it is not any more."""
        node = self._tree.get(checkpoint.digest)
        assert node is not None and node.checkpoint is checkpoint
        node.checkpoint = None
        checkpoint.is_published = False
        if checkpoint.num_pins:
            self._detached.add(checkpoint)
            return
        self._num_unpinned -= 1
        self._queue.discard(checkpoint)
        self.ledger.release_image(checkpoint.pages)
        self._offer(node)

    def _offer(self, node: PrefixNode) -> None:
        """Queue a page for eviction if nothing depends on it."""
        if not (node.is_held or node.children or node.checkpoint):
            self._queue.put(node, node.stamp)

    def _hold(self, node: PrefixNode) -> None:
        self.ledger.retain([node.page])
        self._tree.set_held(node, True)
        self._queue.discard(node)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a published checkpoint until `unpin`; whoever pins it holds its pages too."""
        if not checkpoint.num_pins:
            self._num_unpinned -= 1
            self._queue.discard(checkpoint)
        checkpoint.num_pins += 1

    def _use(self, checkpoint: Checkpoint) -> None:
        node = self._tree.get(checkpoint.digest)
        checkpoint.stamp = self._queue.stamp(self._value(upward(node)))
        self._queue.put(checkpoint, checkpoint.stamp)

    def _value(self, upward: Iterable[PrefixNode | None]) -> float:
        """Worth of a state after the first of these pages, which lead from it to the beginning; None stands for a page that is not in the tree yet.

        Saved: the tokens after the checkpoint before it. Pages: its image, and those before it that nothing else needs, back to a checkpoint or a fork.
        """
        num_saved, num_pages, is_alone = 0, self.image_pages, True
        below: PrefixNode | None = None
        for node in upward:
            if num_saved and node is not None and node.checkpoint is not None:
                break
            is_alone = is_alone and (node is None or len(node.children) == (below is not None))
            num_saved += self._page_size
            num_pages += is_alone
            below = node
        return num_saved / num_pages
