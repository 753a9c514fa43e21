"""How one request's tokens are chosen and when it ends; knows no logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import RequestError

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-4  # below it fp32 logits divided by it leave fp32's range
MAX_TEMPERATURE = 1e4  # from there on every choice is as good as uniform
MAX_PENALTY = 2.0  # as in OpenAI's API
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
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
    # Penalties act on the logits before everything else. Repetition: of tokens in prompt or output, logits above 0 are divided by it, others multiplied.
    # Presence, frequency: taken off tokens in the output, once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # None: none; n: the chosen token's and the n most likely ones', before temperature and filters
    prompt_logprobs: int | None = None  # as logprobs, for each token of the prompt but the first; such a prompt is computed whole, whatever is cached

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
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS, f"use at most {MAX_LOGPROBS}, or None for none")
        self._check_floats()
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop {text!r} is not a non-empty string; leave it out")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids entry", token_id, 0, None, "give token ids of the model's vocabulary")

    def _check_floats(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not isinstance(getattr(self, name), (int, float)):
                raise RequestError(f"{name} {getattr(self, name)!r} is a {type(getattr(self, name)).__name__}, not a number; give a float")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise RequestError(f"temperature {self.temperature} is neither 0 nor from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}; use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p {self.top_p} is outside 0 (excluded) to 1; use 1 to keep every token")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p {self.min_p} is outside 0 to 1; use 0 to keep every token")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise RequestError(f"{name} {getattr(self, name)} is outside -{MAX_PENALTY:g} to {MAX_PENALTY:g}; use 0 for none")
        if not MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise RequestError(f"repetition_penalty {self.repetition_penalty} is outside {MIN_REPETITION} to {MAX_REPETITION:g}; use 1 for none")

    @property
    def penalizes(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_int(name: str, value: int, low: int, high: int | None, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} {value!r} is a {type(value).__name__}, not an integer; {remedy}")
    if value < low or (high is not None and value > high):
        limit = f"below {low}" if value < low else f"above {high}"
        raise RequestError(f"{name} {value} is {limit}; {remedy}")
