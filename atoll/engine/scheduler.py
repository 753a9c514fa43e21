"""Decides what runs in each step: continuous batching, chunked prefill, preemption; knows no tensor, no model and no text.

Policy, in one paragraph. Running requests come first, in order of arrival, one token each for those that decode, chunks for those whose tokens are not all
computed; what the token budget leaves goes to waiting requests, first come first served. Chunks end on a fixed grid counted from position 0 (but for those
that end where a checkpoint is wanted, and the one that ends the sequence), so that how a prompt is cut depends on little else. Pages are appended as rows
are scheduled. When none is free, the prefix cache evicts; when it has nothing left, the request that arrived last gives all of its pages back and waits
again, in order of arrival, with its generated tokens kept. A request begins, at its first admission and after a preemption, behind the longest prefix that
the cache has. It is admitted only when the pages that are free or can be evicted cover its tokens and those that running requests still have to compute,
which keeps preemption rare. Where a connector has more of its prefix than the pool, it is parked until that has been loaded. Of a model that keeps states,
each running request holds one state slot, from its admission until it ends or is preempted. Checkpoints are reserved last, so none of them costs a running
request its pages.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace

from atoll.config import SchedulerConfig
from atoll.engine.offloader import Fetch, Offloader
from atoll.engine.placement import Placement
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixReuse
from atoll.engine.step import Step, StepRow
from atoll.errors import ConfigError
from atoll.kv.guard import ReleaseGuard
from atoll.kv.ledger import PageLedger
from atoll.kv.prefix import PrefixCache
from atoll.kv.prefix_match import Match
from atoll.kv.slot_ledger import SlotLedger
from atoll.offload.base import Completion, Connector, Metadata


@dataclass(frozen=True)
class _Wait:
    """Why the first of the waiting requests was not admitted."""

    request: Request
    match: Match  # what the pool had of it
    num_pages: int = 0  # that it needs besides those reserved for running requests
    budget: int = 0  # tokens that were too few for its first chunk; 0: it was for want of pages


class Scheduler:
    """Owns the requests' pages and state slots: they come from `ledger` and `slots` here and go back to them here."""

    def __init__(
        self,
        config: SchedulerConfig,
        ledger: PageLedger,
        slots: SlotLedger | None = None,
        guard: ReleaseGuard | None = None,
        connector: Connector | None = None,
    ) -> None:
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
        # None: nothing is kept beyond the pool.
        self.offloader = Offloader(connector, self.cache, config.page_size, timeout_s=config.offload_timeout_s) if connector is not None and enabled else None
        self._reuse = PrefixReuse(self.cache, placement, config.page_size, self.offloader)
        self._step: Step | None = None  # scheduled, not committed
        self._wait: _Wait | None = None
        self._num_scheduled = 0  # steps, those without rows too
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.running: list[Request] = []  # in order of arrival

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.num_parked)

    @property
    def num_parked(self) -> int:
        """Requests that wait for a load."""
        return self.offloader.num_parked if self.offloader is not None else 0

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
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            assert self.offloader is not None
            self.offloader.leave(request)
        if self.offloader is not None and not discard:
            self.offloader.note_all(request)
        self._release(request, discard=discard)

    def complete(self, completions: Sequence[Completion]) -> None:
        """Take what transfers have ended; those who waited for a load wait to be admitted again. Not between a step and its commit."""
        if self.offloader is not None:
            for request in self.offloader.complete(completions) + self.offloader.expire():
                _enqueue(self.waiting, request)

    def schedule(self) -> Step:
        """The next step, to be run and committed before another is asked for. It may be without rows only while requests wait for transfers."""
        step = Step()
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
        # Last, so that pages which this round released, and perhaps handed out again, are among them.
        return self._with_metadata(step)

    def schedule_transfers(self) -> Step:
        """A step without rows: clears and transfers alone."""
        return self._with_metadata(Step())

    def commit(self, step: Step, requests: dict[int, Request]) -> None:
        """Note that a step has run: its rows are computed, and what it saved may be restored."""
        self._step = None
        for row in step.rows:
            request = requests[row.request_id]
            request.num_computed = row.start + len(row.token_ids)
            self._reuse.commit(request)

    def preempt_latest(self) -> Request:
        """Stop the request that arrived last among those that run: it waits again, without pages and slot. Not between a step and its commit."""
        victim = self.running.pop()
        self._release(victim)
        victim.num_preemptions += 1
        _enqueue(self.waiting, victim)
        return victim

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, the connector's too; no load may be in flight. Raises PoolError while a request, or a lease for its stores, holds pages."""
        self.cache.reset()
        if self.offloader is not None:
            self.offloader.connector.reset()

    def check(self) -> None:
        """Recount pages, slots, images and pins over everybody who may hold them. Raises PoolCorruptError at the first disagreement."""
        pages = [page for request in self.running for page in request.pages]
        uses = [request.prefix for request in self.running]
        pins = Counter(use.restore for use in uses if use.restore is not None)
        if self.offloader is not None:
            pages += self.offloader.held_pages()
            pins += self.offloader.pins()
        self.ledger.check([*pages, *self.cache.held_pages()])
        self.cache.check(pins, [use.reserved for use in uses if use.reserved is not None])
        if self.slots is not None:
            self.slots.check([request.state_slot for request in self.running if request.state_slot is not None])

    def _admit(self, budget: int, step: Step) -> None:
        reserved = sum(self._pages_missing(request) for request in self.running)
        while self.waiting and len(self.running) + self.num_parked < self.config.max_num_seqs and budget > 0:
            request = self.waiting[0]
            if self._waits_still(request, reserved, budget):
                return
            self._wait = None
            match = self._reuse.look_up(request)
            fetch = self.offloader.look_up(request, match) if self.offloader is not None else None
            if self.offloader is not None and fetch is not None:
                need = fetch.num_new_pages(self.cache.image_pages) + fetch.num_idle if isinstance(fetch, Fetch) else 0
                if reserved + need <= self.cache.num_available:
                    if self.offloader.begin(request, fetch, match):
                        self.waiting.popleft()
                        continue
                    # What made room for it may have been found.
                    match = self._reuse.look_up(request)
                elif self._makes_room:
                    self._wait = _Wait(request, match, num_pages=need)
                    return
                # Else it does without: nothing would ever make room.
            need = self._pages_missing(request) - len(match.pages) + match.num_evictable
            if reserved + need > self.cache.num_available:
                self._wait = _Wait(request, match, num_pages=need)
                return
            reserved += self._pages_missing(request) - len(match.pages)
            self._reuse.begin(request, match)
            count = self._chunk(request, budget)
            if not count:
                self._reuse.release(request)
                self._wait = _Wait(request, match, budget=budget)
                return
            # One that was parked may have arrived before others that run already.
            _enqueue(self.running, self.waiting.popleft())
            request.state_slot = self.slots.allocate() if self.slots is not None else None
            self._reuse.admit(request, step)
            num_pages = len(request.pages)
            appended = self._append_pages(request, count, step)
            assert appended, "the pages of an admitted request were counted as available"
            reserved -= len(request.pages) - num_pages
            budget -= count
            self._append_row(request, count, step)

    def _waits_still(self, request: Request, reserved: int, budget: int) -> bool:
        """Whether what the first request waits for has not come, and the pool has of it what it had: then a look-up, which walks its prompt, can be spared.

        What a connector has may have changed. That is seen when there is room, since nothing is admitted or loaded by an old look-up.
        """
        wait = self._wait
        if wait is None or wait.request is not request or not self._makes_room:
            return False
        return (reserved + wait.num_pages > self.cache.num_available or budget <= wait.budget) and self.cache.stands(wait.match)

    @property
    def _makes_room(self) -> bool:
        """Whether pages will be given back without anybody's being admitted."""
        return bool(self.running) or (self.offloader is not None and self.offloader.frees_pages)

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
        """Give `request` the pages for `count` more tokens, preempting if it must; False: it waits for leased pages, or was itself the latest and preempted."""
        need = self._pages_for(request.num_computed + count) - len(request.pages)
        while need > self.cache.num_available:
            if self.offloader is not None and self.offloader.frees_pages:
                return False
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

    def _with_metadata(self, step: Step) -> Step:
        self._num_scheduled += 1
        clears = self.guard.take() if self.guard is not None else []
        if self.offloader is not None:
            metadata = self.offloader.connector.build_metadata(self._num_scheduled, clears)
        else:
            metadata = Metadata(self._num_scheduled, tuple(clears))
        # The same lists: a request that is withdrawn leaves this step.
        self._step = replace(step, metadata=metadata)
        return self._step

    def _release(self, request: Request, *, discard: bool = False) -> None:
        self._reuse.release(request, discard=discard)
        if self.slots is not None and request.state_slot is not None:
            self.slots.release(request.state_slot)
        request.state_slot = None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _pages_missing(self, request: Request) -> int:
        """Pages that `request` needs, besides its own, until its next token has been computed too."""
        return self._pages_for(request.num_tokens + 1) - len(request.pages)


def _enqueue(queue: MutableSequence[Request], request: Request) -> None:
    """Put a request among others in order of arrival."""
    insort(queue, request, key=lambda one: one.request_id)


def _withdraw(step: Step, request: Request) -> None:
    """Take a request's rows and copies out of a step: its slot and its pages are about to be somebody else's."""
    for rows in (step.decodes, step.prefills):
        rows[:] = [row for row in rows if row.request_id != request.request_id]
    for copies in (step.restores, step.saves):
        copies[:] = [copy for copy in copies if copy.state_slot != request.state_slot]
