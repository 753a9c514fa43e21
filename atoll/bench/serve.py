"""`bench serve`: load on an OpenAI-compatible server, arriving at a rate, at most so many requests at a time, and what its clients saw."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from atoll.bench.serve_client import Outcome, stream
from atoll.bench.serve_data import Conversation, Turn, arrival_times
from atoll.errors import ConfigError
from atoll.eval.endpoint import Endpoint

CHAT = "/v1/chat/completions"
ENDPOINTS = ("/v1/completions", CHAT)


@dataclass(frozen=True)
class ServeOptions:
    """How the load comes."""

    endpoint: Endpoint
    path: str = ENDPOINTS[0]
    request_rate: float = float("inf")  # conversations a second
    burstiness: float = 1.0
    max_concurrency: int | None = None  # requests at a time; None: no limit
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    num_warmups: int = 0  # requests before the clock starts

    def __post_init__(self) -> None:
        if self.path not in ENDPOINTS:
            raise ConfigError(f"endpoint {self.path!r} is unknown; use one of {', '.join(ENDPOINTS)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency {self.max_concurrency} is below 1; give 1 or more, or leave it out")
        arrival_times(1, self.request_rate, self.burstiness, self.seed)

    @property
    def chat(self) -> bool:
        return self.path == CHAT


@dataclass(frozen=True)
class ServeRun:
    """What was seen."""

    outcomes: list[Outcome]  # in the order in which they ended
    duration_s: float


def run_serve(options: ServeOptions, conversations: list[Conversation], on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> ServeRun:
    """Send everything and wait for it. A conversation's next turn is sent when the last one is answered; one that failed ends it."""
    return asyncio.run(_run(options, conversations, on_outcome))


async def _run(options: ServeOptions, conversations: list[Conversation], on_outcome: Callable[[Outcome], None]) -> ServeRun:
    for number in range(options.num_warmups):
        await stream(options.endpoint, options.path.removeprefix("/v1/"), Talk(options).body(conversations[number % len(conversations)][0]))
    gate: AbstractAsyncContextManager[Any] = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency is not None else nullcontext()
    outcomes: list[Outcome] = []

    async def converse(conversation: Conversation, at_s: float) -> None:
        await asyncio.sleep(begin + at_s - time.perf_counter())
        talk = Talk(options)
        for turn in conversation:
            body = talk.body(turn)
            async with gate:
                outcome = await stream(options.endpoint, options.path.removeprefix("/v1/"), body)
            outcomes.append(outcome)
            on_outcome(outcome)
            if outcome.error is not None:
                return
            talk.answered(outcome.text)

    times = arrival_times(len(conversations), options.request_rate, options.burstiness, options.seed)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for conversation, at_s in zip(conversations, times, strict=True):
            tasks.create_task(converse(conversation, at_s))
    return ServeRun(outcomes, time.perf_counter() - begin)


class Talk:
    """One conversation so far, as request bodies: messages for chat, else one text that grows."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def body(self, turn: Turn) -> dict[str, Any]:
        """Of the next turn."""
        options = self._options
        body: dict[str, Any] = {"model": options.endpoint.model, "max_tokens": turn.output_len, "temperature": options.temperature}
        if options.ignore_eos:
            body["ignore_eos"] = True
        return body | self._said(turn.said) | dict(options.extra_body)

    def answered(self, text: str) -> None:
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        self._text += text + "\n"

    def _said(self, said: Any) -> dict[str, Any]:
        if self._options.chat:
            self._messages = [*self._messages, *([{"role": "user", "content": said}] if isinstance(said, str) else said)]
            return {"messages": self._messages}
        if not isinstance(said, str):
            return {"prompt": said}
        self._text += said
        return {"prompt": self._text}
