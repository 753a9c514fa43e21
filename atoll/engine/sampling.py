"""How one request's tokens are chosen and when it ends; knows no logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import RequestError

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-4  # below it fp32 logits divided by it leave fp32's range
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling; raises RequestError for a value out of range.

    The filters apply in this order: temperature, top_k, top_p (over what top_k keeps), min_p (relative to the most likely token).
    The same seed and prompt give the same tokens, alone or in a batch, and after a preemption.
    """

    max_tokens: int = 16  # tokens generated at most
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # most likely tokens kept; 0: all
    top_p: float = 1.0  # probability kept, from the most likely down; the token that crosses it is kept
    min_p: float = 0.0  # tokens kept have at least this share of the most likely one's probability
    seed: int | None = None  # None: from the engine's seed and the request's number
    stop: str | Sequence[str] = ()  # text that ends the output, itself left out
    stop_token_ids: Sequence[int] = ()  # tokens that end the output, their text left out
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    min_tokens: int = 0  # tokens generated before any stop, stop token or end of sequence counts
    logprobs: int | None = None  # None: none; n: the chosen token's and the n most likely ones', before temperature and filters

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence):
                raise RequestError(f"{name} {getattr(self, name)!r} is no list; give a list, or () for none")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1, None, "generate at least one token")
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, "use at most max_tokens")
        _check_int("top_k", self.top_k, 0, None, "use 0 to keep every token")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED, "use a seed in that range, or None")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"use at most {MAX_LOGPROBS}, or None for none")
        self._check_floats()
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop {text!r} is not a non-empty string; leave it out")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids entry", token_id, 0, None, "give token ids of the model's vocabulary")

    def _check_floats(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), (int, float)):
                raise RequestError(f"{name} {getattr(self, name)!r} is a {type(getattr(self, name)).__name__}, not a number; give a float")
        if not math.isfinite(self.temperature) or self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(f"temperature {self.temperature} is neither 0 nor at least {MIN_TEMPERATURE}; use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p {self.top_p} is outside 0 (excluded) to 1; use 1 to keep every token")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p {self.min_p} is outside 0 to 1; use 0 to keep every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_int(name: str, value: int, low: int, high: int | None, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} {value!r} is a {type(value).__name__}, not an integer; {remedy}")
    if value < low or (high is not None and value > high):
        limit = f"below {low}" if value < low else f"above {high}"
        raise RequestError(f"{name} {value} is {limit}; {remedy}")
