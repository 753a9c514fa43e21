"""One streaming request to an OpenAI-compatible server, and when its pieces came. Costs little beside what it measures: plain sockets, one connection each."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from atoll.eval.endpoint import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Endpoint, error_text

_MAX_LINE_BYTES = 2**22


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


async def stream(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Outcome:
    """Send `body` with streaming on; what goes wrong is told in the outcome."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    outcome = Outcome(time.perf_counter())
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await _exchange(endpoint, path, data, outcome)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end_s = time.perf_counter()
    if outcome.error is None and not outcome.finished:
        outcome.error = "the stream broke off before the server said that it was done"
    return outcome


async def _exchange(endpoint: Endpoint, path: str, data: bytes, outcome: Outcome) -> None:
    url = urlsplit(endpoint.base_url)
    secure = url.scheme == "https"
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(url.hostname, url.port or (443 if secure else 80), ssl=secure or None, limit=_MAX_LINE_BYTES)
    try:
        headers = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        lines = [f"POST {url.path}/v1/{path} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | endpoint.headers).items())]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)
        await writer.drain()
        status, chunked = await _read_head(reader)
        if status != 200:
            outcome.error = error_text(status, b"".join([part async for part in _parts(reader, chunked=chunked)]))
            return
        async for event in _events(reader, chunked=chunked):
            take_event(outcome, event, time.perf_counter())
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the body comes in chunks."""
    status_line = (await reader.readline()).split(None, 2)
    if len(status_line) < 2 or not status_line[1].isdigit():
        raise ValueError(f"the server's first line is {b' '.join(status_line)[:80]!r}, which is no HTTP")
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked |= line.startswith(b"transfer-encoding:") and line.endswith(b"chunked")
    return int(status_line[1]), chunked


async def _parts(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        # The connection closes behind the body.
        while part := await reader.read(_MAX_LINE_BYTES):
            yield part
        return
    while size := int((await reader.readline()).partition(b";")[0].strip() or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _events(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The data of each server-sent event; one event is one line, as in OpenAI's API."""
    rest = b""
    async for part in _parts(reader, chunked=chunked):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


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
