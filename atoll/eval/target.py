"""What is asked: the contract between a task and whatever answers, an engine in this process or a server."""

from collections.abc import Iterator, Sequence
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
    error: str | None = None


class Target(Protocol):
    """Answers prompts."""

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Answer]:
        """One answer per prompt, in the order in which they are done. What goes wrong with one prompt is told in its answer."""

    def forget(self) -> None:
        """Empty the prefix cache, where that can be done; nothing is being answered."""

    def describe(self) -> dict[str, Any]:
        """What a run must note to be repeated: the model, the options, the versions."""
