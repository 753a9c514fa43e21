"""A scheduler with a slow connector over a shadow, driven as the engine drives them; checks every page, row, state and blob after every step."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from atoll.config import SchedulerConfig
from atoll.engine.request import Request
from atoll.engine.scheduler import Scheduler
from atoll.engine.step import Step
from atoll.kv.guard import ReleaseGuard
from atoll.kv.ledger import PageLedger
from atoll.kv.slot_ledger import SlotLedger
from atoll.offload.base import BlobKind, Metadata, Span, Transfer
from atoll.offload.base_worker import Fence
from tests.engine.shadow import ALPHABET, Shadow, ShadowEngine, contents
from tests.offload.memories import ShadowMemory
from tests.offload.paces import at_random
from tests.offload.slow import Key, Slow


class OffloadShadow(Shadow):
    """Has a worker run where an engine has it run, and tells its recorder what is touched."""

    def __init__(self, page_size: int, slow: Slow) -> None:
        super().__init__(page_size)
        self._slow = slow
        slow.worker.use(ShadowMemory(self))

    def execute(self, step: Step, requests: dict[int, Request]) -> None:
        metadata, recorder = step.metadata, self._slow.recorder
        recorder.touched("clear", metadata.clears)
        for page in metadata.clears:
            self._write_page(page, None)
        if metadata.moves:
            self._slow.worker.run(metadata, Fence(metadata.fence))
        recorder.touched("restore", [page for copy in step.restores for page in copy.pages])
        for row in step.rows:
            recorder.ran(row, self.page_size)
        recorder.touched("save", [page for copy in step.saves for page in copy.pages])
        super().execute(replace(step, metadata=Metadata(metadata.fence)), requests)


class OffloadShadowEngine(ShadowEngine):
    """Transfers move at random, and fail at random."""

    def __init__(self, random: Random, num_pages: int = 40, *, num_slots: int | None = 4, image_pages: int = 2, fail_rate: float = 0.1, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "page_size": 4,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "prefill_grid": 8,
            "offload_timeout_s": 10.0,
        }
        config = SchedulerConfig(**{**defaults, "prefix_caching": True, "image_pages": image_pages, **options})
        self.random = random
        self.fail_rate = fail_rate
        self.slow = Slow(at_random(random), self.outcome)
        self.shadow = OffloadShadow(config.page_size, self.slow)
        self.connector, self.worker, self.recorder = self.slow.connector, self.slow.worker, self.slow.recorder
        self.connector.takes = lambda transfer, span: random.random() >= fail_rate / 2
        guard = ReleaseGuard()
        slots = SlotLedger(num_slots) if num_slots is not None else None
        self.scheduler = Scheduler(config, PageLedger(num_pages, guard.released), slots, guard, self.connector)
        self.now_s = 0.0
        assert self.scheduler.offloader is not None
        self.scheduler.offloader._clock = lambda: self.now_s
        self._check_what_is_spared()
        self._note_what_arrives()
        self.image_pages = image_pages if slots is not None else 0
        self.live: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.num_steps = 0
        self.num_bare_steps = 0  # without rows
        self.num_verified = 0  # blobs
        self.num_spared = 0  # look-ups of a request that still waits
        self._next_id = 0
        self._arrived: defaultdict[int, list[Span]] = defaultdict(list)  # of loads that a request waited for before its first admission
        self._wanted: dict[Key, tuple[Any, ...]] = {}
        self._seen: set[Key] = set()

    def _check_what_is_spared(self) -> None:
        """A request that is not looked up again would be found as it was."""
        scheduler = self.scheduler
        waits_still = scheduler._waits_still

        def checked(request: Request, reserved: int, budget: int) -> bool:
            spared = waits_still(request, reserved, budget)
            if spared:
                assert scheduler._wait is not None
                now = scheduler._reuse.look_up(request)
                assert replace(now, misses=Counter()) == replace(scheduler._wait.match, misses=Counter()), (
                    "what is in the pool of a waiting request has changed"
                )
                self.num_spared += 1
            return spared

        scheduler._waits_still = checked  # type: ignore[method-assign]

    def _note_what_arrives(self) -> None:
        offloader = self.scheduler.offloader
        assert offloader is not None
        adopt = offloader._adopt

        def noted(load: Any, arrived: Sequence[bool]) -> None:
            for request in load.requests:
                if request.prefix.num_cached_tokens is None:
                    self._arrived[request.request_id] += [span for span, has_come in zip(load.transfer.spans, arrived, strict=True) if has_come]
            adopt(load, arrived)

        offloader._adopt = noted  # type: ignore[method-assign]

    def check_fetched(self, request: Request) -> None:
        """No more of a request's tokens count as fetched than what arrived for it can have brought."""
        arrived, use = self._arrived[request.request_id], request.prefix
        has_state = any(span.kind is BlobKind.STATE for span in arrived)
        limit = (use.num_cached_tokens or 0) if has_state else sum(span.kind is BlobKind.KV for span in arrived) * self.scheduler.config.page_size
        assert 0 <= use.num_fetched_tokens <= limit, f"{use.num_fetched_tokens} tokens count as fetched, {limit} at most were"

    def outcome(self, transfer: Transfer, is_load: bool) -> list[bool]:
        if self.random.random() >= 4 * self.fail_rate:
            return [True] * len(transfer.spans)
        return [self.random.random() >= 0.25 for _ in transfer.spans]

    def step(self, before_run: Callable[[], None] = lambda: None, before_commit: Callable[[], None] = lambda: None) -> Step:
        self.now_s += 1.0
        self.take_completions()
        step = self.scheduler.schedule() if self.scheduler.has_work else self.scheduler.schedule_transfers()
        self.scheduler.check()
        offloader = self.scheduler.offloader
        assert offloader is not None
        assert step.rows or not self.scheduler.has_work or offloader.in_flight, "nothing runs, and nothing is on its way"
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(self.scheduler.running) + self.scheduler.num_parked <= self.scheduler.config.max_num_seqs
        before_run()
        self.shadow.execute(step, self.live)
        before_commit()
        self.scheduler.commit(step, self.live)
        self.scheduler.check()
        self.num_steps += 1
        self.num_bare_steps += not step.rows
        for row in step.rows:
            request = self.live[row.request_id]
            if row.sample is not None:
                request.output_token_ids.append(contents(request)[-1] % ALPHABET)
                if len(request.output_token_ids) >= request.max_tokens:
                    self.end(request)
        self.verify()
        return step

    def take_completions(self) -> None:
        self.scheduler.complete(self.worker.poll())

    def end(self, request: Request, *, discard: bool = False) -> None:
        self.note_names(request)
        self.check_fetched(request)
        pages = list(request.pages)
        super().end(request, discard=discard)
        if discard:
            self.check_discarded(pages)

    def check_discarded(self, pages: list[int]) -> None:
        """The last of a bad request's pages that are named are those that others hold too, or that others' pages come after."""
        scheduler = self.scheduler
        assert scheduler.offloader is not None
        others = {page for request in scheduler.running for page in request.pages}
        others.update(page for load in scheduler.offloader._loads.values() for page in load.fetch.held)
        for page in reversed(pages):
            node = scheduler.cache._tree.of_page(page)
            if node is not None:
                assert page in others or node.children, f"page {page} is bad, and still found by its name"
                return

    def run(self) -> None:
        num_steps = 0
        while self.scheduler.has_work:
            self.step()
            num_steps += 1
            assert num_steps < 3000, "no progress"

    def settle(self) -> None:
        """Until no transfer is left."""
        self.worker.pace = at_random(self.random)
        self.run()
        for _ in range(1000):
            if not self.connector.has_pending_work:
                break
            self.step()
        self.take_completions()
        assert self.scheduler.offloader is not None and not self.scheduler.offloader.in_flight
        self.recorder.check_nothing_is_leased()

    def check_nothing_is_held(self) -> None:
        """And forget everything."""
        self.settle()
        super().check_nothing_is_held()

    def note_names(self, request: Request) -> None:
        """What the blobs of a request's pages, and of the states at their ends, must hold."""
        size, wanted = self.scheduler.config.page_size, contents(request)
        for number, digest in enumerate(request.prefix.digests):
            if (BlobKind.KV, digest) not in self._wanted:
                self._wanted[BlobKind.KV, digest] = tuple(wanted[number * size + 1 : (number + 1) * size + 1])
                self._wanted[BlobKind.STATE, digest] = tuple((wanted[(number + 1) * size], part) for part in range(self.image_pages))

    def verify(self) -> None:
        """What has arrived in the connector's dict is what its name says, and nothing has touched a page out of order."""
        self.recorder.check()
        for request in self.live.values():
            self.note_names(request)
        for key in self.connector.index.keys() - self._seen:
            blob = self.worker.blobs[key]
            found = blob[0] if key[0] is BlobKind.KV else tuple(page[0] for page in blob)
            assert found == self._wanted[key], f"the {key[0]} blob of {key[1].hex()} is not of its tokens"
            self.num_verified += 1
        self._seen = set(self.connector.index)
