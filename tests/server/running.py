"""A server with the demo model on a free port, in a thread of this process, so that tests can look into its engine."""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx2

from atoll.config import EngineConfig, ServerConfig, make_engine_config
from atoll.engine.build import make_engine
from atoll.engine.engine import Engine
from atoll.models.loader import LoadedModel, load_model
from atoll.server.engine_worker import EngineWorker
from atoll.server.messages import Command, Report, decode, encode
from atoll.server.serve import make_server, open_socket
from atoll.server.service import Service

# In fp32, so that a token does not hang on how its batch was rounded.
ENGINE = {"device": "cpu", "kv_format": "fp32", "max_num_seqs": 16, "max_model_len": 512, "num_pages": 600}


@cache
def demo() -> LoadedModel:
    import torch

    return load_model("demo", device="cpu", dtype=torch.float32)


@cache
def shallow_demo() -> LoadedModel:
    """Two of the demo's eight layers, one of each kind: what it says is noise, for tests that look at requests and not at answers."""
    loaded = demo()
    model: Any = copy.copy(loaded.model)
    model.layers = model.layers[2:4]
    return replace(loaded, model=model)


class ThreadLink:
    """An engine on a thread of this process, spoken to by the same bytes as one in a process of its own."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.engine = make_engine(loaded.model, loaded.config, loaded.tokenizer, config)
        self.tokenizer = loaded.tokenizer
        self.worker = EngineWorker(self.engine, loaded.tokenizer, lambda report: self._on_report(decode(encode(report))))
        self.facts = self.worker.facts
        self._on_report: Callable[[Report], None] = lambda report: None
        self._thread = threading.Thread(target=self.worker.run, name="atoll-engine", daemon=True)

    def start(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self._thread.start()

    def put(self, command: Command) -> None:
        self.worker.put(decode(encode(command)))

    def join(self) -> None:
        self._thread.join()

    def cut(self) -> None:
        """No thread can be."""


@dataclass(frozen=True)
class Running:
    url: str
    service: Service
    link: ThreadLink
    http: httpx2.Client
    drain: Any

    @property
    def engine(self) -> Engine:
        return self.link.engine

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function of the engine on its own thread, between two steps."""
        self.link.worker.calls["test"] = function
        loop = self.service.loop
        assert loop._loop is not None
        return asyncio.run_coroutine_threadsafe(loop.call("test"), loop._loop).result(60)


@contextmanager
def running_server(engine_options: dict[str, Any] | None = None, loaded: LoadedModel | None = None, **options: Any) -> Iterator[Running]:
    """Stopped at the end in good order; what an engine that is still alive holds then must be nothing."""
    loaded = loaded or demo()
    link = ThreadLink(loaded, make_engine_config(ENGINE | (engine_options or {})))
    config = ServerConfig(**{"port": 0, "api_key": None, "shutdown_s": 10.0, **options})
    service = Service(link, "demo", config, "0.0")
    ready = threading.Event()
    listener = open_socket(config)
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    server = make_server(service, on_listen=ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield Running(url, service, link, http, server.drain)
    finally:
        server.drain()
        thread.join(60)
        listener.close()
    assert not thread.is_alive(), "the server did not stop"
    if not service.loop.is_dead:
        link.engine.check()
        assert not link.engine.has_work
        assert not service.loop._tickets and not service.loop.num_open
