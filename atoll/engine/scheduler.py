"""Decides what runs in each step: continuous batching, chunked prefill, preemption; knows no tensor, no model and no text.

Policy, in one paragraph. Running requests come first, in order of arrival, one token each for those that decode, chunks for those whose tokens are not all
computed; what the token budget leaves goes to waiting requests, first come first served. Chunks end on a fixed grid counted from position 0 (but for those
that end where a checkpoint is wanted, and the one that ends the sequence), so that how a prompt is cut depends on little else. Pages are appended as rows
are scheduled. When none is free, the prefix cache evicts; when it has nothing left, the request that arrived last gives all of its pages back and waits at
the front with its generated tokens kept. A request begins, at its first admission and after a preemption, behind the longest prefix that the cache has. It
is admitted only when the pages that are free or can be evicted cover its tokens and those that running requests still have to compute, which keeps
preemption rare. Of a model that keeps states, each running request holds one state slot, from its admission until it ends or is preempted. Checkpoints are
reserved last, so none of them costs a running request its pages.
"""

from collections import Counter, deque

from atoll.config import SchedulerConfig
from atoll.engine.placement import Placement
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixReuse
from atoll.engine.step import Step, StepRow
from atoll.errors import ConfigError
from atoll.kv.guard import ReleaseGuard
from atoll.kv.ledger import PageLedger
from atoll.kv.prefix import PrefixCache
from atoll.kv.slot_ledger import SlotLedger


class Scheduler:
    """Owns the requests' pages and state slots: they come from `ledger` and `slots` here and go back to them here."""

    def __init__(self, config: SchedulerConfig, ledger: PageLedger, slots: SlotLedger | None = None, guard: ReleaseGuard | None = None) -> None:
        capacity = (ledger.num_pages - 1) * config.page_size
        if config.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is above the {capacity} tokens that {ledger.num_pages - 1} pages of {config.page_size} hold; "
                f"use {capacity} or less, or more pages"
            )
        if slots is not None and slots.num_slots < config.max_num_seqs:
            raise ConfigError(f"{slots.num_slots} state slots are below max_num_seqs {config.max_num_seqs}; give each running sequence one")
        if slots is not None and config.image_pages > ledger.num_usable - -(-config.max_model_len // config.page_size):
            # A request that restores one, and then needs as many pages as a sequence may, would wait for ever.
            raise ConfigError(
                f"image_pages {config.image_pages} and max_model_len {config.max_model_len} do not fit in {ledger.num_usable} pages of {config.page_size} "
                "together; use image_pages 0, or more pages"
            )
        self.config = config
        self.ledger = ledger
        self.slots = slots  # None: the model keeps no state
        self.guard = guard  # None: attention masks what no sequence owns
        # A prefix of a model with states cannot be used without a checkpoint, so without images nothing is kept.
        enabled = config.prefix_caching and (slots is None or config.image_pages > 0)
        self.cache = PrefixCache(ledger, config.page_size, image_pages=config.image_pages if enabled and slots is not None else 0, enabled=enabled)
        placement = Placement(config.checkpoint_grid, config.checkpoint_interval, config.checkpoint_policies)
        self._reuse = PrefixReuse(self.cache, placement, config.page_size)
        self._step: Step | None = None  # scheduled, not committed
        self.waiting: deque[Request] = deque()  # in order of arrival: preemption takes the latest first and puts it in front
        self.running: list[Request] = []  # in order of arrival

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request whose `num_tokens` is below max_model_len (Engine.add sees to it)."""
        assert 0 < request.num_tokens < self.config.max_model_len
        self.waiting.append(request)

    def finish(self, request: Request, *, discard: bool = False) -> None:
        """Take a request out, wherever it stands, and give its pages and its slot back; a step that is not committed yet names it no more.

        `discard`: something is wrong with what it computed or reused, so nobody is to reuse it.
        """
        if request in self.running:
            self.running.remove(request)
            if self._step is not None:
                _withdraw(self._step, request)
        else:
            self.waiting.remove(request)
        pages = request.pages
        self._release(request)
        if discard:
            self.cache.discard(pages)

    def schedule(self) -> Step:
        """The next step, to be run and committed before another is asked for; never without rows while there is work."""
        step = self._step = Step()
        # Set aside first: however long the prompts, every decoding request gets its token.
        budget = self.config.max_num_batched_tokens - sum(request.num_uncomputed == 1 for request in self.running)
        position = 0
        while position < len(self.running):
            request = self.running[position]
            decoding = request.num_uncomputed == 1
            count = 1 if decoding else self._chunk(request, budget)
            if count and self._append_pages(request, count, step):
                budget -= 0 if decoding else count
                self._append_row(request, count, step)
            position += 1
        if not step.preempted:
            self._admit(budget, step)
        self._reuse.save(self.running, step)
        if self.guard is not None:
            # Last, so that pages which this round released, and perhaps handed out again, are among them.
            step.clears.extend(self.guard.take())
        return step

    def commit(self, step: Step, requests: dict[int, Request]) -> None:
        """Note that a step has run: its rows are computed, and what it saved may be restored."""
        self._step = None
        for row in step.rows:
            request = requests[row.request_id]
            request.num_computed = row.start + len(row.token_ids)
            self._reuse.commit(request)

    def preempt_latest(self) -> Request:
        """Stop the request that arrived last among those that run: it waits in front, without pages and slot. Not between a step and its commit."""
        victim = self.running.pop()
        self._release(victim)
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Raises PoolError while a request runs."""
        self.cache.reset()

    def check(self) -> None:
        """Recount pages, slots, images and pins over everybody who may hold them. Raises PoolCorruptError at the first disagreement."""
        pages = [page for request in self.running for page in request.pages]
        self.ledger.check([*pages, *self.cache.held_pages()])
        uses = [request.prefix for request in self.running]
        self.cache.check(Counter(use.restore for use in uses if use.restore is not None), [use.reserved for use in uses if use.reserved is not None])
        if self.slots is not None:
            self.slots.check([request.state_slot for request in self.running if request.state_slot is not None])

    def _admit(self, budget: int, step: Step) -> None:
        reserved = sum(self._pages_missing(request) for request in self.running)
        while self.waiting and len(self.running) < self.config.max_num_seqs and budget > 0:
            request = self.waiting[0]
            match = self._reuse.look_up(request)
            reserved += self._pages_missing(request) - len(match.pages)
            if reserved > self.cache.num_available - match.num_evictable:
                return
            self._reuse.begin(request, match)
            count = self._chunk(request, budget)
            if not count:
                self._reuse.release(request)
                return
            self.running.append(self.waiting.popleft())
            request.state_slot = self.slots.allocate() if self.slots is not None else None
            self._reuse.admit(request, step)
            num_pages = len(request.pages)
            appended = self._append_pages(request, count, step)
            assert appended, "the pages of an admitted request were counted as available"
            reserved -= len(request.pages) - num_pages
            budget -= count
            self._append_row(request, count, step)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens to compute next: all up to the next wanted checkpoint or the end, or as many as end on the grid within the budget; 0: none fits."""
        wanted = request.prefix.wanted
        count = (wanted[0] if wanted else request.num_tokens) - request.num_computed
        if count <= budget:
            return count
        grid = self.config.prefill_grid
        end = (request.num_computed + budget) // grid * grid
        return max(0, end - request.num_computed)

    def _append_pages(self, request: Request, count: int, step: Step) -> bool:
        """Give `request` the pages for `count` more tokens, preempting if it must; False: it was itself the latest, and was preempted."""
        need = self._pages_for(request.num_computed + count) - len(request.pages)
        while need > self.cache.num_available:
            victim = self.preempt_latest()
            step.preempted.append(victim.request_id)
            if victim is request:
                return False
        if need > 0:
            request.pages.extend(self.cache.allocate(need))
        return True

    def _append_row(self, request: Request, count: int, step: Step) -> None:
        ends = count == request.num_uncomputed
        row = StepRow(
            request_id=request.request_id,
            start=request.num_computed,
            token_ids=request.tokens(request.num_computed, count),
            pages=list(request.pages),
            sample=request.sample_task() if ends else None,
            score=request.score_task(request.num_computed, count),
            state_slot=request.state_slot,
        )
        (step.decodes if count == 1 else step.prefills).append(row)

    def _release(self, request: Request) -> None:
        self._reuse.release(request)
        if self.slots is not None and request.state_slot is not None:
            self.slots.release(request.state_slot)
        request.state_slot = None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _pages_missing(self, request: Request) -> int:
        """Pages that `request` needs, besides its own, until its next token has been computed too."""
        return self._pages_for(request.num_tokens + 1) - len(request.pages)


def _withdraw(step: Step, request: Request) -> None:
    """Take a request's rows and copies out of a step: its slot and its pages are about to be somebody else's."""
    for rows in (step.decodes, step.prefills):
        rows[:] = [row for row in rows if row.request_id != request.request_id]
    for copies in (step.restores, step.saves):
        copies[:] = [copy for copy in copies if copy.state_slot != request.state_slot]
