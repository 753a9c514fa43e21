"""`bench serve`: load on an OpenAI-compatible server, arriving at a rate, at most so many requests at a time, and what its clients saw."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from uvicorn.loops.auto import auto_loop_factory

from atoll.bench.serve_client import Outcome, Recording, record
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
    leave_share: float = 0.0  # of the clients go away before their answer ends, somewhere in it

    def __post_init__(self) -> None:
        if self.path not in ENDPOINTS:
            raise ConfigError(f"endpoint {self.path!r} is unknown; use one of {', '.join(ENDPOINTS)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency {self.max_concurrency} is below 1; give 1 or more, or leave it out")
        if not 0 <= self.leave_share < 1:
            raise ConfigError(f"leave_share {self.leave_share} is outside 0 to below 1; 0.33 makes a third of the clients leave")
        arrival_times(1, self.request_rate, self.burstiness, self.seed)

    @property
    def chat(self) -> bool:
        return self.path == CHAT


@dataclass(frozen=True)
class ServeRun:
    """What was seen."""

    outcomes: list[Outcome]  # in the order in which they ended
    duration_s: float


def run_serve(options: ServeOptions, conversations: list[Conversation], on_request: Callable[[], None] = lambda: None) -> ServeRun:
    """Send everything and wait for it. A conversation's next turn is sent when the last one is answered; one that failed or was left ends it."""
    # uvloop's where it is installed.
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        recordings, duration_s = runner.run(_Load(options, on_request).run(conversations))
    return ServeRun([one if isinstance(one, Outcome) else one.outcome() for one in recordings], duration_s)


class _Load:
    def __init__(self, options: ServeOptions, on_request: Callable[[], None]) -> None:
        self._options = options
        self._on_request = on_request
        self._path = options.path.removeprefix("/v1/")
        self._done: list[Recording | Outcome] = []
        self._gate: AbstractAsyncContextManager[Any] = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency is not None else nullcontext()

    async def run(self, conversations: list[Conversation]) -> tuple[list[Recording | Outcome], float]:
        options = self._options
        await asyncio.gather(*(self._warm_up(conversations[number % len(conversations)]) for number in range(options.num_warmups)))
        times = arrival_times(len(conversations), options.request_rate, options.burstiness, options.seed)
        rng = random.Random(options.seed)
        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for conversation, at_s in zip(conversations, times, strict=True):
                leaves = [rng.randrange(turn.output_len) if rng.random() < options.leave_share else None for turn in conversation]
                tasks.create_task(self._converse(conversation, begin_s + at_s, leaves))
        return self._done, time.perf_counter() - begin_s

    async def _warm_up(self, conversation: Conversation) -> None:
        async with self._gate:
            await record(self._options.endpoint, self._path, Talk(self._options).body(conversation[0]))

    async def _converse(self, conversation: Conversation, at_s: float, leaves: list[int | None]) -> None:
        await asyncio.sleep(at_s - time.perf_counter())
        talk = Talk(self._options)
        for number, turn in enumerate(conversation):
            body = talk.body(turn)
            async with self._gate:
                recording = await record(self._options.endpoint, self._path, body, leaves[number])
            self._on_request()
            if number == len(conversation) - 1:
                # Reading it can wait until the clock has stopped.
                self._done.append(recording)
                return
            outcome = recording.outcome()
            self._done.append(outcome)
            if outcome.error is not None or outcome.left:
                return
            talk.answered(outcome.text)


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
