"""Finds function calls in a model's text as it grows, however it is cut into pieces; knows no request and no HTTP."""

from dataclasses import dataclass
from uuid import uuid4

from atoll.server.tool_formats import CLOSE, OPEN, Arguments, BrokenCallError, Call, Schemas, ToolFormat, overlap

# A CLOSE within an argument is text, and to see that it is one the call is read. So many are tried, so that no text takes long.
MAX_CLOSES = 16


@dataclass(frozen=True)
class CallBegin:
    """A call, before its arguments."""

    index: int
    name: str
    call_id: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments; all of them joined are a JSON object."""

    index: int
    text: str


Part = str | CallBegin | CallArguments  # str: text that is no call


class ToolCallParser:
    """Of one answer. Pieces go in, parts come out as soon as they are certain; text that is not a call comes out as it went in.

    A call that a grammar holds comes out while it grows. A free model may break off or go wrong, and what came out cannot be taken back: its call comes out
    when it is complete, and as text if it is broken. Space between calls, and between a call and text, is nobody's and left out.
    """

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, *, is_held: bool, has_text: bool = True, max_calls: int | None = None) -> None:
        self.num_calls = 0  # complete ones
        self._format = tool_format
        self._schemas = schemas
        self._is_held = is_held
        self._has_text = has_text  # false: a grammar allows calls alone
        self._max_calls = max_calls  # a free model's further ones are left out
        self._begins = {tool_format.begin(name): name for name in schemas} if is_held else {}
        self._text = ""  # what has come since the last thing that was certain
        self._at = 0  # how much of it is done with
        self._parts: list[Part] = []
        self._num_begun = 0
        self._arguments: Arguments | None = None  # of the held call that grows
        self._follows_call = False
        self._space = ""  # before a call that is not certain yet
        self._num_closes = 0  # of a free call: tried so far
        self._num_read = 0  # of a free call: characters up to the last one tried

    def push(self, text: str) -> list[Part]:
        self._text += text
        while self._advance(is_last=False):
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """What is left once the answer has ended."""
        while self._advance(is_last=True):
            pass
        if self._arguments is not None:
            self._add_arguments(self._arguments.finish(self._text[self._at :]))
        elif not self._is_cut_call():
            self._say(self._space + self._text[self._at :])
        self._text, self._at, self._space = "", 0, ""
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        self._text, self._at = self._text[self._at :], 0
        return parts

    def _advance(self, *, is_last: bool) -> bool:
        """Go on by one thing; False: more text is needed."""
        if self._arguments is not None:
            return self._grow(self._arguments)
        if not self._text.startswith(OPEN, self._at):
            return self._find_call()
        return self._begin_held() if self._is_held else self._read_whole(is_last=is_last)

    def _is_cut_call(self) -> bool:
        """Whether what is left can only be the beginning of a held call."""
        return self._is_held and (not self._has_text or self._text.startswith(OPEN, self._at))

    def _find_call(self) -> bool:
        """Release text up to the next call, or to what may become one; the space before that waits."""
        at = self._text.find(OPEN, self._at)
        end = len(self._text) - overlap(self._text, OPEN) if at < 0 else at
        text = self._space + self._text[self._at : end]
        said = text.rstrip()
        self._say(said)
        self._space = text[len(said) :]
        self._at = end
        return at >= 0

    def _begin_held(self) -> bool:
        for begin, name in self._begins.items():
            if self._text.startswith(begin, self._at):
                self._at += len(begin)
                self._begin(name)
                self._arguments = self._format.held_arguments(self._schemas[name])
                return True
        rest = self._text[self._at :]
        return not any(begin.startswith(rest) for begin in self._begins) and self._pass_over()

    def _grow(self, arguments: Arguments) -> bool:
        text, length = arguments.take(self._text[self._at :])
        self._at += length
        self._add_arguments(text)
        if arguments.is_complete:
            self._end()
        return arguments.is_complete

    def _read_whole(self, *, is_last: bool) -> bool:
        """The call at hand, once a CLOSE is found that ends it, or the answer does."""
        while self._num_closes < MAX_CLOSES:
            close = self._text.find(CLOSE, self._at + self._num_read)
            if close < 0 and not is_last:
                return False
            self._num_closes += 1
            end = len(self._text) if close < 0 else close
            try:
                call = self._format.read(self._text[self._at + len(OPEN) : end], self._schemas)
            except BrokenCallError:
                break
            end += len(CLOSE) if close >= 0 else 0
            if call is not None:
                self._add(call)
                self._leave(end)
                return True
            if close < 0:
                break
            self._num_read = end - self._at
        return self._pass_over()

    def _pass_over(self) -> bool:
        """What looked like a call is text."""
        self._say(self._space + OPEN)
        self._space = ""
        self._leave(self._at + len(OPEN))
        return True

    def _leave(self, at: int) -> None:
        self._at = at
        self._num_closes = self._num_read = 0

    def _add(self, call: Call) -> None:
        if self._num_begun != self._max_calls:
            self._begin(call.name)
            self._add_arguments(call.arguments)
            self._end()

    def _begin(self, name: str) -> None:
        self._space = ""
        self._parts.append(CallBegin(self._num_begun, name, f"call_{uuid4().hex}"))
        self._num_begun += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._num_begun - 1, text))

    def _end(self) -> None:
        self._arguments = None
        self._follows_call = True
        self.num_calls += 1

    def _say(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._parts.append(text)
