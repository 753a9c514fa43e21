"""What is asked: the contract between a task and whatever answers, an engine in this process or a server."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.engine.sampling import SamplingParams
from atoll.eval.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt. What a server does not tell is None."""

    index: int  # of the prompt in the call
    text: str
    finish_reason: str  # stop, length, error, or a server's own word
    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompt, read from the prefix cache
    num_fetched_tokens: int | None = None  # of these, brought back from a tier
    error: str | None = None


class Target(Protocol):
    """Answers prompts."""

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Answer]:
        """One answer per prompt, in the order in which they are done. What goes wrong with one prompt is told in its answer."""

    def forget(self) -> None:
        """Empty the prefix cache, where that can be done; nothing is being answered."""

    def out_of_order(self) -> AbstractContextManager[None]:
        """Within it, pages are cleared after they were loaded. Raises ConfigError where that cannot be had.

        Nothing is being answered as it begins and ends; what it leaves in the prefix cache is wrong.
        """

    def close(self) -> None:
        """The end: nothing is asked any more."""

    def describe(self) -> dict[str, Any]:
        """What a run must note to be repeated: the model, the options, the versions."""
