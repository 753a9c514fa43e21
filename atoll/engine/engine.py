"""Drives requests to their end: schedule, run, sample, commit, detokenize; knows no weights and how no prompt was spelled."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.config import SchedulerConfig
from atoll.engine.constraint import Constraint
from atoll.engine.output import FinishReason, RequestOutput, StreamPiece, TokenLogprobs
from atoll.engine.prompts import check_request
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixUse
from atoll.engine.runner import Runner
from atoll.engine.sampler import SampledToken, request_seed
from atoll.engine.sampling import SamplingParams
from atoll.engine.scheduler import Scheduler
from atoll.engine.text import TextStream, Tokenizer
from atoll.errors import RequestError
from atoll.kv.guard import ReleaseGuard
from atoll.kv.pool import PagePool
from atoll.kv.prefix_stats import PrefixStats
from atoll.kv.slots import SlotPool
from atoll.offload.base import ConnectorStats
from atoll.offload.base_worker import Offload, TransferWorker

log = logging.getLogger(__name__)

THREADS_END_S = 2.0  # that a connector's threads have to end, which then have nothing to do any more
TRANSFER_WAIT_S = 0.001  # at most, in a step that has nothing to compute


@dataclass
class _Generation:
    """A request and what its caller sees of it."""

    request: Request
    prompt: str | None
    index: int
    text: TextStream
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]
    stop_reason: str | int | None = None
    error: str | None = None


class Engine:
    """Requests in, pieces of text out.

    Whatever ends a request (its own stop, an error, an abort, an exception in the caller), its pages and its state slot come back.
    """

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        seed: int = 0,
        slots: SlotPool | None = None,  # of a hybrid model
        guard: ReleaseGuard | None = None,  # told of the pool's releases, for attention that does not mask
        offload: Offload | None = None,  # where pages and states go besides the pool; the runner has its worker
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.slots = slots
        self.guard = guard
        self.tokenizer = tokenizer
        self.offload = offload
        connector = offload.connector if offload is not None else None
        self.scheduler = Scheduler(config, pool.ledger, slots.ledger if slots is not None else None, guard, connector)
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_preemptions = 0
        self._seed = seed
        self._next_id = 0
        self._is_closed = False
        self._generations: dict[int, _Generation] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_pending_transfers(self) -> bool:
        """Whether `step` is due for the sake of transfers alone."""
        offloader = self.scheduler.offloader
        return offloader is not None and (offloader.in_flight or offloader.connector.has_pending_work)

    @property
    def num_parked(self) -> int:
        """Requests that wait for a load."""
        return self.scheduler.num_parked

    @property
    def offload_stats(self) -> ConnectorStats | None:
        """What was moved beyond the pool and back so far; None without offload."""
        return self.offload.connector.stats if self.offload is not None else None

    def check_request(self, token_ids: list[int], params: SamplingParams, cache_salt: str | None = None) -> None:
        """Raise RequestError for a prompt that this engine cannot take."""
        check_request(token_ids, params, cache_salt, max_model_len=self.scheduler.config.max_model_len, vocab_size=self.vocab_size)

    def check(self) -> None:
        """Recount every page, slot and pin. Raises PoolCorruptError at the first disagreement."""
        self.scheduler.check()

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache has spared so far."""
        return self.scheduler.cache.stats

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, a connector's too, so that all pages are free; the statistics go on. Raises RequestError while a request waits or runs."""
        if self.has_work:
            raise RequestError(
                f"requests that wait or run: {len(self._generations)}, 0 is the limit for a reset of the prefix cache; let them end, or abort them"
            )
        if not self.drain_transfers():
            raise RequestError("pages are leased to transfers that do not end, 0 is the limit for a reset of the prefix cache; try again later")
        self.scheduler.reset_prefix_cache()

    def add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        index: int = 0,
        cache_salt: str | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """Queue a request; returns its id. Output that would pass max_model_len is cut there, with finish_reason "length".

        Requests reuse each other's prefixes only under the same `cache_salt`. A `constraint` is this request's alone; with one, min_tokens and ignore_eos would
        ask for tokens that it does not allow, so they must be left out.
        """
        self.check_request(token_ids, params, cache_salt)
        if constraint is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError("min_tokens or ignore_eos is given beside a response format, which may have to end earlier; leave one of them out")
        request_id = self._next_id
        self._next_id += 1
        eos = () if params.ignore_eos else self.tokenizer.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            params=params,
            seed=params.seed if params.seed is not None else request_seed(self._seed, request_id),
            max_tokens=min(params.max_tokens, self.scheduler.config.max_model_len - len(token_ids)),
            stop_token_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            prefix=PrefixUse.of_salt(cache_salt),
            constraint=constraint,
        )
        self._generations[request_id] = _Generation(request, prompt, index, TextStream(self.tokenizer.detokenizer(), params.stop), [], [None] * len(token_ids))
        self.scheduler.add(request)
        return request_id

    def step(self) -> list[StreamPiece]:
        """Run one step; what it added, one piece for each request that has a new token. While requests wait for a load alone, it waits a little, too."""
        if not self.has_work:
            self._step_transfers()
            return []
        self._take_completions()
        step = self.scheduler.schedule()
        result = self.runner.execute(step)
        self.scheduler.commit(step, {row.request_id: self._generations[row.request_id].request for row in step.rows})
        if not step.rows and self.offload is not None:
            self.offload.worker.wait(TRANSFER_WAIT_S)
        self.num_steps += bool(step.rows)
        self.num_preemptions += len(step.preempted)
        for row in step.rows:
            if row.request_id in result.scores:
                # By position: after a preemption the same tokens are scored again.
                first = row.start + 1
                scores = result.scores[row.request_id]
                self._generations[row.request_id].prompt_logprobs[first : first + len(scores)] = scores
        pieces = [self._advance(self._generations[request_id], token) for request_id, token in result.tokens.items()]
        self._check_idle()
        return pieces

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now; its output so far, or None when it has already ended."""
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        output = self._finish(generation, "abort").output
        self._check_idle()
        return output

    def abort_all(self) -> None:
        """End every request."""
        for request_id in list(self._generations):
            self.abort(request_id)

    def use_worker(self, worker: TransferWorker) -> None:
        """Have another worker move pages from now on, one that knows the pool. Raises RequestError while a transfer is in flight."""
        if self.offload is None or self.has_pending_transfers:
            raise RequestError(f"the worker of {'no connector' if self.offload is None else 'transfers in flight'} was to be replaced; drain them first")
        self.offload = self.offload._replace(worker=worker)
        self.runner.worker = worker

    def drain_transfers(self, timeout_s: float | None = None) -> bool:
        """Without a request: wait until no page is leased any more; False: some still are after the time.

        None: offload_timeout_s, from when each began. So what hangs is waited for once, however often this is called; its pages stay leased.
        """
        offloader = self.scheduler.offloader
        if offloader is None or not offloader.in_flight:
            return True
        if timeout_s is None:
            self._drain(lambda: offloader.in_flight and not offloader.is_stuck, offloader.timeout_s)
        else:
            self._drain(lambda: offloader.in_flight, timeout_s)
        if offloader.in_flight:
            # A last look: it has ended meanwhile, or there is something to be said.
            self._step_transfers()
        return not offloader.in_flight

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request, let a connector finish what it has begun as far as the time allows, and give its memory back. The engine is not used again.

        May be called twice.
        """
        self.abort_all()
        if self.offload is not None and not self._is_closed:
            # What the time did not allow now is not waited for again.
            self._is_closed = True
            offloader = self.scheduler.offloader
            # Behind a transfer that hangs nothing ends.
            self._drain(lambda: self.has_pending_transfers and not (offloader is not None and offloader.is_stuck), timeout_s)
            self.offload.worker.close(THREADS_END_S)

    def _drain(self, is_pending: Callable[[], bool], timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while is_pending():
            if time.monotonic() >= end_s:
                return False
            self._step_transfers()
        return True

    def _step_transfers(self) -> None:
        """A step for transfers alone."""
        if self.offload is None or not self.has_pending_transfers:
            return
        self._take_completions()
        step = self.scheduler.schedule_transfers()
        self.runner.execute(step)
        self.scheduler.commit(step, {})
        self.offload.worker.wait(TRANSFER_WAIT_S)
        self._take_completions()
        if not self.has_pending_transfers:
            self._check_idle()

    def _take_completions(self) -> None:
        if self.offload is not None:
            self.scheduler.complete(self.offload.worker.poll())

    @property
    def _nan_remedy(self) -> str:
        if self.guard is None and not self.runner.spec.mask_unowned_kv:
            return f"attention backend {self.runner.attention_backend} does not mask unowned rows: turn the guard on, or take another backend"
        return "try dtype float32 or another kv_format, and check the model's weights"

    def _advance(self, generation: _Generation, token: SampledToken) -> StreamPiece:
        """Take a request's new token."""
        request = generation.request
        if token.token_id is None:
            generation.error = f"the logits after {request.num_tokens} tokens hold NaN or Inf, so no token can be chosen; {self._nan_remedy}"
            log.error("request %d: %s", request.request_id, generation.error)
            return self._finish(generation, "error")
        counts = not request.below_min_tokens
        if request.constraint is not None and not request.constraint.accept(token.token_id):
            generation.error = f"token {token.token_id} is not one that the response format allows here; no allowed token was possible"
            return self._finish(generation, "error")
        request.output_token_ids.append(token.token_id)
        if token.logprobs is not None:
            generation.logprobs.append(token.logprobs)
        reason: FinishReason | None = None
        if counts and token.token_id in request.stop_token_ids:
            generation.stop_reason = token.token_id
            reason = "stop"
        else:
            generation.text.push(token.token_id, may_stop=counts)
            if generation.text.stopped_by is not None:
                reason = "stop"
            elif len(request.output_token_ids) >= request.max_tokens:
                reason = "length"
        if reason is not None:
            return self._finish(generation, reason, token)
        return _piece(generation, generation.text.take(), token)

    def _finish(self, generation: _Generation, reason: FinishReason, token: SampledToken | None = None) -> StreamPiece:
        request = generation.request
        # Rows and states behind logits of NaN must not reach another request.
        self.scheduler.finish(request, discard=reason == "error")
        del self._generations[request.request_id]
        piece = generation.text.finish(may_stop=reason != "abort")
        if generation.text.stopped_by is not None:
            generation.stop_reason = generation.text.stopped_by
            reason = "stop"
        output = RequestOutput(
            request_id=request.request_id,
            prompt=generation.prompt,
            prompt_token_ids=request.prompt_token_ids,
            text=generation.text.text,
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=generation.stop_reason,
            error=generation.error,
            logprobs=generation.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=generation.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            num_preemptions=request.num_preemptions,
            num_cached_tokens=request.prefix.num_cached_tokens or 0,
            num_fetched_tokens=request.prefix.num_fetched_tokens,
            prefix_misses=dict(request.prefix.misses),
        )
        return _piece(generation, piece, token, output)

    def _check_idle(self) -> None:
        if not self.has_work:
            # No request is left, so no slot may be held, and no page but those of the prefix cache: a recount finds one that was lost.
            self.check()


def _piece(generation: _Generation, text: str, token: SampledToken | None, output: RequestOutput | None = None) -> StreamPiece:
    """What a request's new token added, if it has one."""
    token_ids = [token.token_id] if token is not None and token.token_id is not None else []
    logprobs = (token.logprobs,) if token is not None and token.logprobs is not None else ()
    request = generation.request
    scored = request.params.prompt_logprobs is not None and len(request.output_token_ids) == 1
    prompt_logprobs = generation.prompt_logprobs if scored else None
    return StreamPiece(request.request_id, generation.index, text, token_ids, output, logprobs, prompt_logprobs)
