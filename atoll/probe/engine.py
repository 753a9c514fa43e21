"""The probe of a whole engine: the same prompts through a zero-filled pool and a poisoned one must give the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.engine.build import choose_device, choose_dtype
from atoll.engine.llm import LLM, Prompt
from atoll.engine.output import RequestOutput
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.models.loader import LoadedModel, load_model

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Count from one to ten: one, two,",
    "Once upon a time, in a village by the sea, there lived",
    "The three primary colours are",
    "Water boils at a temperature of",
    "A haiku about autumn:\n",
    "def fibonacci(n):\n",
    "The opposite of hot is",
)


@dataclass(frozen=True)
class Divergence:
    """The first token of one prompt that differs."""

    prompt: int
    token: int  # index among the generated tokens
    clean: int | None  # token id with the zero-filled pool; None where that output had ended
    poisoned: int | None
    clean_text: str
    poisoned_text: str


@dataclass(frozen=True)
class EngineReport:
    """One model, with one fill against zeros."""

    fill: str
    prompts: int
    tokens: int  # generated with the zero-filled pool
    divergences: tuple[Divergence, ...]
    max_logprob_difference: float  # over the tokens before each divergence; 0 where not a bit changed

    @property
    def same(self) -> bool:
        return not self.divergences


def probe_engine(
    model: str | LoadedModel,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    fill: str = "nan",
    max_tokens: int = 32,
    **options: Any,
) -> EngineReport:
    """Generate greedily with both fills, all prompts at once; `options` as for LLM.

    Raises ConfigError for fill "zero", and ConfigError or ModelError for what LLM would refuse.
    """
    if fill == "zero":
        raise ConfigError("fill 'zero' compares zeros with zeros; use nan, 0x7f, inf, max or random")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0)
    if isinstance(model, str):
        device = choose_device(options.get("device", "auto"))
        model = load_model(model, device=device, dtype=choose_dtype(options.get("dtype", "auto")))
    clean, poisoned = (_generate(model, prompts, params, options | {"kv_fill": kv_fill}) for kv_fill in ("zero", fill))
    pairs = list(zip(clean, poisoned, strict=True))
    divergences = tuple(found for i, (a, b) in enumerate(pairs) if (found := first_divergence(i, a, b)) is not None)
    difference = max((_logprob_difference(a, b) for a, b in pairs), default=0.0)
    return EngineReport(fill, len(prompts), sum(len(output.token_ids) for output in clean), divergences, difference)


def first_divergence(prompt: int, clean: RequestOutput, poisoned: RequestOutput) -> Divergence | None:
    """None where the two are the same."""
    for token in range(max(len(clean.token_ids), len(poisoned.token_ids))):
        a, b = (output.token_ids[token] if token < len(output.token_ids) else None for output in (clean, poisoned))
        if a != b:
            return Divergence(prompt, token, a, b, clean.text, poisoned.text)
    return None


def _generate(model: LoadedModel, prompts: Sequence[Prompt], params: SamplingParams, options: dict[str, Any]) -> list[RequestOutput]:
    llm = LLM.from_loaded(model, **options)
    try:
        with llm:
            return llm.generate(prompts, params)
    finally:
        # The next pool may need the memory of this one.
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _logprob_difference(clean: RequestOutput, poisoned: RequestOutput) -> float:
    """Largest difference over the tokens that both chose, up to the first that they did not; NaN counts as infinite."""
    worst = 0.0
    for a, b in zip(clean.logprobs or (), poisoned.logprobs or (), strict=False):
        if a.token_id != b.token_id:
            break
        difference = abs(a.logprob - b.logprob)
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst
