"""Chooses tokens from logits: penalties, greedy, temperature, top-k, top-p, min-p, seeds, log probabilities; knows no request's text and no page.

A row's choice depends on that row alone. Its random number is a hash of (seed, index of the generated token), so there is no generator whose state a batch,
an order of arrival or a preemption could shift; the token is where that number falls in the row's cumulative distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atoll.engine.output import TokenLogprobs
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask
from atoll.engine.transfer import upload

_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class SampledToken:
    """One row's choice; `token_id` None: the row's logits were not finite, so there is none."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, tasks: list[SampleTask]) -> list[SampledToken]:
    """One token per row of `logits` [N, V] fp32. Reads the device once the whole choice is queued."""
    # A row's maximum is NaN when any of its entries is, so one pass finds both the greedy choice and the bad rows.
    highest, chosen = logits.max(dim=-1)
    bad = ~highest.isfinite()
    allowed = _constrain(_suppress(_penalize(logits, tasks), tasks), tasks)
    if allowed is not logits:
        chosen = allowed.argmax(dim=-1)
    drawn = [row for row, task in enumerate(tasks) if not task.params.greedy]
    if drawn:
        chosen = chosen.clone()
        if len(drawn) == len(tasks):
            chosen = _draw(allowed, tasks)
        else:
            rows = upload(drawn, torch.int64, logits.device)
            chosen[rows] = _draw(allowed[rows], [tasks[row] for row in drawn])
    wanted = [row for row, task in enumerate(tasks) if task.params.logprobs is not None]
    details = _logprobs(logits, chosen, tasks, wanted) if wanted else {}
    # The one wait for the device in a step.
    token_ids = chosen.masked_fill(bad, -1).tolist()
    return [SampledToken(None) if token_id < 0 else SampledToken(token_id, details.get(row)) for row, token_id in enumerate(token_ids)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a seed and a token's index: two rounds of the splitmix64 finalizer.

    48 bits, so that its product with any fp64 sum stays below that sum.
    """
    return (_mix64(_mix64(seed) + index) >> 16) * 2.0**-48


def request_seed(engine_seed: int, request_id: int) -> int:
    """The seed of a request that brings none."""
    return _mix64(_mix64(engine_seed ^ 0xA7011) + request_id)


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _penalize(logits: torch.Tensor, tasks: list[SampleTask]) -> torch.Tensor:
    """`logits`, or a copy in which tokens that have appeared are less likely, or more."""
    places = [(row, token_id) for row, task in enumerate(tasks) for token_id, _ in task.counts]
    if not places:
        return logits
    rows, token_ids = upload(places, torch.int64, logits.device).unbind(1)
    factors = [
        (task.params.repetition_penalty, task.params.presence_penalty * (count > 0) + task.params.frequency_penalty * count)
        for task in tasks
        for _, count in task.counts
    ]
    repetition, taken_off = upload(factors, torch.float32, logits.device).unbind(1)
    values = logits[rows, token_ids]
    return logits.index_put((rows, token_ids), torch.where(values > 0, values / repetition, values * repetition) - taken_off)


def _suppress(logits: torch.Tensor, tasks: list[SampleTask]) -> torch.Tensor:
    """`logits`, or a copy in which suppressed tokens are -inf."""
    pairs = [(row, token_id) for row, task in enumerate(tasks) for token_id in task.suppressed]
    if not pairs:
        return logits
    rows, token_ids = upload(pairs, torch.int64, logits.device).unbind(1)
    return logits.index_put((rows, token_ids), logits.new_full((), float("-inf")))


def _constrain(logits: torch.Tensor, tasks: list[SampleTask]) -> torch.Tensor:
    """`logits`, or a copy in which tokens that a constraint does not allow are -inf."""
    masks = {row: task.allowed for row, task in enumerate(tasks) if task.allowed is not None}
    if not masks:
        return logits
    rows = upload(list(masks), torch.int64, logits.device)
    bits = np.stack([np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little") for mask in masks.values()])
    allowed = torch.from_numpy(bits[:, : logits.shape[-1]]).bool().to(logits.device)
    return logits.index_put((rows,), logits[rows].masked_fill(~allowed, float("-inf")))


def _draw(logits: torch.Tensor, tasks: list[SampleTask]) -> torch.Tensor:
    """One random token per row [N]."""
    device = logits.device
    params = [task.params for task in tasks]
    temperature = upload([p.temperature for p in params], torch.float32, device)
    # The maximum is taken off first, so that a small temperature cannot overflow.
    probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None], dim=-1)  # [N, V]
    min_p = upload([p.min_p for p in params], torch.float32, device)
    kept = probs.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)
    cut = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1]
    if cut:
        rows = upload(cut, torch.int64, device)
        kept[rows] = kept[rows].masked_fill(~_top(probs[rows], [params[row] for row in cut]), 0.0)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    at = upload([uniform(task.seed, task.index) for task in tasks], torch.float64, device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability is above the number; a token of probability 0 never is the first.
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)


def _top(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Which tokens top_k and then top_p keep [N, V] bool; of equally likely ones the lower ids."""
    vocab = probs.shape[-1]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    top_k = upload([min(p.top_k or vocab, vocab) for p in params], torch.int64, probs.device)
    top_p = upload([p.top_p for p in params], torch.float64, probs.device)
    within_k = torch.arange(vocab, device=probs.device) < top_k[:, None]
    ordered = ordered.double().masked_fill_(~within_k, 0.0)
    before = ordered.cumsum(dim=-1) - ordered  # probability of all more likely tokens
    total = ordered.sum(dim=-1, keepdim=True)
    # top_p 1 keeps everything: rounding in the sums must not cut the tail.
    within_p = (before < top_p[:, None] * total) | (top_p[:, None] >= 1)
    return torch.zeros_like(within_k.expand_as(order)).scatter_(-1, order, within_k & within_p)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log probabilities of `token_ids` [N] and of the `counts[i]` most likely tokens in each row of `logits` [N, V] fp32. Waits for the device."""
    values = logits.log_softmax(dim=-1)
    top_values, top_ids = values.topk(min(max(counts), values.shape[-1]), dim=-1)
    own_values = values.gather(-1, token_ids[:, None])[:, 0]
    columns = zip(token_ids.tolist(), own_values.tolist(), top_ids.tolist(), top_values.tolist(), counts, strict=True)
    return [TokenLogprobs(token_id, value, tuple(zip(ids[:count], row[:count], strict=True))) for token_id, value, ids, row, count in columns]


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, tasks: list[SampleTask], wanted: list[int]) -> dict[int, TokenLogprobs]:
    rows = upload(wanted, torch.int64, logits.device)
    counts = [tasks[row].params.logprobs or 0 for row in wanted]
    return dict(zip(wanted, token_logprobs(logits[rows], chosen[rows], counts), strict=True))
