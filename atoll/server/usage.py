"""Token counts as OpenAI's `usage` has them."""

from collections.abc import Iterable
from typing import Any

from atoll.engine.output import RequestOutput


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int, num_fetched_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens, "fetched_tokens": num_fetched_tokens},
    }


class UsageCount:
    """The usage of one HTTP request as its sequences grow. A prompt counts once, however many sequences continue it."""

    def __init__(self, prompts: Iterable[list[int]], num_choices: int) -> None:
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._num_choices = num_choices
        self._num_generated = 0
        self._num_cached = 0
        self._num_fetched = 0

    def add(self, num_tokens: int) -> None:
        self._num_generated += num_tokens

    def finish(self, index: int, output: RequestOutput) -> None:
        """A sequence has ended: what was reused of its prompt, as the first of n met it."""
        if index % self._num_choices == 0:
            self._num_cached += output.num_cached_tokens
            self._num_fetched += output.num_fetched_tokens

    def as_json(self) -> dict[str, Any]:
        return usage(self._num_prompt_tokens, self._num_generated, self._num_cached, self._num_fetched)
