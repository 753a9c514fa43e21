"""One streaming request to an OpenAI-compatible server, and when its bytes came. They are noted as they come and read once nobody waits for a clock."""

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from atoll.eval.endpoint import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Endpoint, error_text

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds of one clock."""

    start_s: float  # when it was sent
    arrivals_s: list[float] = field(default_factory=list)  # of each piece that has text
    end_s: float = 0.0
    text: str = ""
    finished: bool = False  # the server said that it was done
    prompt_tokens: int | None = None  # as the server counts; None: it did not tell
    told_output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    left: bool = False  # the client went away on purpose

    @property
    def output_tokens(self) -> int:
        """As the server counts them, else the pieces."""
        return len(self.arrivals_s) if self.told_output_tokens is None else self.told_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """To the first token; None: none came."""
        return self.arrivals_s[0] - self.start_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Per output token, the first one excluded; None: there is no second one."""
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between neighbouring pieces."""
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Recording:
    """One request as its bytes came; times in seconds of one clock."""

    start_s: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0
    error: str | None = None
    left: bool = False

    def outcome(self) -> Outcome:
        """What they say. What goes wrong is told in the outcome."""
        outcome = Outcome(self.start_s, end_s=self.end_s, error=self.error, left=self.left)
        try:
            if self.parts:
                self._read(outcome)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        if outcome.error is None and not outcome.finished and not outcome.left:
            outcome.error = "the stream broke off before the server said that it was done"
        return outcome

    def _read(self, outcome: Outcome) -> None:
        raw = b"".join(data for _, data in self.parts)
        ends = list(accumulate(len(data) for _, data in self.parts))
        head, _, body = raw.partition(b"\r\n\r\n")
        status_line, *lines = head.split(b"\r\n")
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[1].isdigit():
            raise ValueError(f"the server's first line is {status_line[:80]!r}, which is no HTTP")
        chunked = any(line.lower().startswith(b"transfer-encoding:") and line.lower().rstrip().endswith(b"chunked") for line in lines)
        chunks = _chunks(body) if chunked else _lines(body)
        if int(words[1]) != 200:
            outcome.error = error_text(int(words[1]), b"".join(data for data, _ in chunks))
            return
        rest, begin = b"", len(raw) - len(body)
        for chunk, end in chunks:
            *events, rest = (rest + chunk).split(b"\n")
            for event in events:
                # One event is one line, as in OpenAI's API.
                if event.startswith(b"data:"):
                    take_event(outcome, event[5:].strip(), self.parts[bisect_left(ends, begin + end)][0])


def _chunks(body: bytes) -> Iterator[tuple[bytes, int]]:
    """The data of each whole chunk of HTTP's chunked encoding, and where it ends in the body."""
    at = 0
    while (found := body.find(b"\r\n", at)) >= 0:
        begin = found + 2
        end = begin + int(body[at:found].partition(b";")[0], 16)
        if end == begin or end > len(body):
            return
        yield body[begin:end], end
        at = end + 2


def _lines(body: bytes) -> Iterator[tuple[bytes, int]]:
    """As `_chunks`, of a body without them."""
    at = 0
    for line in body.splitlines(keepends=True):
        at += len(line)
        yield line, at


class _Recorder(asyncio.Protocol):
    """Notes what comes, until the answer or the connection ends, or `leave_after` events have come."""

    def __init__(self, recording: Recording, leave_after: int | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._recording = recording
        self._leave_after = leave_after
        self._num_events = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self._recording.parts.append((time.perf_counter(), data))
        self._tail = self._tail[-len(_LAST_CHUNK) :] + data[-len(_LAST_CHUNK) :]
        if self._leave_after is not None:
            self._num_events += data.count(b"data:")
            self._recording.left = self._num_events >= self._leave_after
        if self._recording.left or self._tail.endswith(_LAST_CHUNK):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def record(endpoint: Endpoint, path: str, body: dict[str, Any], leave_after: int | None = None) -> Recording:
    """Send `body` with streaming on. After `leave_after` events the client goes away; 0: as soon as the request is sent."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    recording = Recording(time.perf_counter())
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await _exchange(endpoint, path, data, recording, leave_after)
    except (OSError, ValueError) as error:
        recording.error = f"{type(error).__name__}: {error}"
    recording.end_s = time.perf_counter()
    return recording


async def _exchange(endpoint: Endpoint, path: str, data: bytes, recording: Recording, leave_after: int | None) -> None:
    url = urlsplit(endpoint.base_url)
    secure = url.scheme == "https"
    recorder = _Recorder(recording, leave_after)
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: recorder, url.hostname or "", url.port or (443 if secure else 80), ssl=secure or None
        )
    try:
        headers = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        lines = [f"POST {url.path}/v1/{path} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | endpoint.headers).items())]
        transport.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)
        recording.left = leave_after == 0
        if not recording.left:
            await recorder.ended
    finally:
        # What is still to be written goes out first.
        transport.close()


def take_event(outcome: Outcome, data: bytes, now_s: float) -> None:
    """Add one event. An event without text (a role, a reason to finish, usage) is no piece."""
    if data == b"[DONE]":
        outcome.finished = True
        return
    event = json.loads(data)
    if "error" in event:
        outcome.error = str(event["error"].get("message", event["error"]) if isinstance(event["error"], dict) else event["error"])
    if event.get("choices"):
        choice = event["choices"][0]
        spoken = choice.get("delta") or {}
        text = choice.get("text") or spoken.get("content") or spoken.get("reasoning_content")
        if text:
            outcome.arrivals_s.append(now_s)
            outcome.text += text
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.told_output_tokens = usage.get("completion_tokens")
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
