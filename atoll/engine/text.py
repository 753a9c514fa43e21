"""A request's text as it grows: detokenized, searched for stop strings, released only once it cannot become one; knows no logits."""

from collections.abc import Sequence
from typing import Any, Protocol


class Detokenizer(Protocol):
    """Text from a growing sequence of tokens; what it returned once stays as it was."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is still held, an incomplete character included."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> list[int]: ...
    def detokenizer(self) -> Detokenizer: ...


class TextStream:
    """The text of one request and how much of it the caller has seen."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._num_released = 0

    def push(self, token_id: int, may_stop: bool = True) -> None:
        """Append a token's text; with `may_stop`, cut it before the first stop string that this token completes."""
        self._extend(self._detokenizer.push(token_id), may_stop)

    def finish(self, may_stop: bool = True) -> str:
        """Append what the detokenizer still holds and release everything."""
        if self.stopped_by is None:
            self._extend(self._detokenizer.finish(), may_stop)
        return self._release(len(self.text))

    def take(self) -> str:
        """The text that nothing can change any more and that the caller has not seen."""
        held = max((self._overlap(stop) for stop in self._stop), default=0)
        return self._release(len(self.text) - held)

    def _extend(self, piece: str, may_stop: bool) -> None:
        length = len(self.text)
        self.text += piece
        if not may_stop or not piece:
            return
        found: tuple[int, str] | None = None
        for stop in self._stop:
            # From here on a match ends in the new piece; an older one came before min_tokens and does not count.
            at = self.text.find(stop, max(0, length - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is not None:
            self.text, self.stopped_by = self.text[: found[0]], found[1]

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that is a beginning of `stop`, shorter than it."""
        for length in range(min(len(stop) - 1, len(self.text)), 0, -1):
            if self.text.endswith(stop[:length]):
                return length
        return 0

    def _release(self, end: int) -> str:
        piece = self.text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return piece
