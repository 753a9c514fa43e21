"""What the endpoints share: the engine's loop, the tokenizer and its threads, the limits; knows no HTTP."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from atoll.config import ServerConfig
from atoll.engine.prompts import check_request
from atoll.engine.sampling import SamplingParams
from atoll.errors import AtollError, UnknownModelError
from atoll.server.engine_loop import EngineLoop
from atoll.server.engine_process import EngineLink
from atoll.server.grammars import Grammars
from atoll.server.metrics import ServerMetrics
from atoll.server.tool_formats import choose_tool_format

T = TypeVar("T")


class Service:
    """One model, served. `start` and `stop` run on the event loop that the server runs on."""

    def __init__(self, link: EngineLink, model_name: str, config: ServerConfig, version: str) -> None:
        self.version = version
        self.config = config
        self.model_name = model_name
        self.tokenizer = link.tokenizer
        self.created_s = int(time.time())
        self.max_model_len = link.facts.max_model_len
        self.vocab_size = link.facts.vocab_size
        self.tool_format = choose_tool_format(config.tool_call_parser, self.tokenizer.chat_template)
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.metrics = ServerMetrics(model_name)
        self.loop = EngineLoop(link, max_queued=config.max_queued, metrics=self.metrics)
        self._threads = ThreadPoolExecutor(config.num_text_threads, thread_name_prefix="atoll-text")

    async def start(self) -> None:
        self.loop.start()
        # The first use of a chat template imports for a second; a model without one says so to whoever asks.
        await self.in_thread(self._warm_up)

    async def stop(self) -> None:
        await self.loop.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError for another model than the one that is served; None is that one."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(f"model {name[:100]!r} is not served here; use {self.model_name!r}, or leave it out")

    def check_request(self, token_ids: list[int], params: SamplingParams, cache_salt: str | None) -> None:
        """Raise RequestError for a prompt that the engine cannot take; from any thread."""
        check_request(token_ids, params, cache_salt, max_model_len=self.max_model_len, vocab_size=self.vocab_size)

    async def in_thread(self, function: Callable[..., T], *arguments: object, **options: object) -> T:
        """Run work on text beside the event loop and the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *arguments, **options))

    def _warm_up(self) -> None:
        try:
            self.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        except AtollError:
            self.tokenizer.encode("Hello")
