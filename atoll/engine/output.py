"""What a caller gets back for a request, whole or piece by piece; knows no tensor."""

from dataclasses import dataclass, field
from typing import Literal

from atoll.kv.prefix_stats import MissReason

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one generated token, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), the most likely first, as many as SamplingParams.logprobs asked for


@dataclass(frozen=True)
class RequestOutput:
    """One finished request."""

    request_id: int
    prompt: str | None  # as given; None when it came as token ids
    prompt_token_ids: list[int]
    text: str  # ends before the stop string or stop token
    token_ids: list[int]  # all that were generated, the one that ended the output included
    finish_reason: FinishReason  # stop, length (max_tokens or max_model_len), error, abort
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None  # what went wrong, for finish_reason "error"
    logprobs: list[TokenLogprobs] | None = None  # one per generated token, when asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per token of the prompt, None for the first, when asked for
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, reused and not computed when the request was first admitted
    num_fetched_tokens: int = 0  # of num_cached_tokens, those that were not in the pool and that a connector brought back
    prefix_misses: dict[MissReason, int] = field(default_factory=dict)  # the prompt's other tokens by reason; empty without prefix caching


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step added to one request; `output` comes with the last piece."""

    request_id: int
    index: int  # of the prompt in the call
    text: str  # may be empty: text that could still turn into a stop string, or half a character, is held back
    token_ids: list[int]
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token of token_ids, when asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # as RequestOutput's, with the first piece

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None
