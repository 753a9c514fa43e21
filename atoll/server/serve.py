"""Serves a model until a signal comes, then lets what runs finish; knows no endpoint."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from atoll.config import ServerConfig
from atoll.errors import ConfigError
from atoll.server.app import make_app
from atoll.server.service import Service
from atoll.server.signals import stop_signals

log = logging.getLogger(__name__)

# Beyond the deadline, for the last answers to be made, and again for their last bytes to leave.
CLOSING_S = 5.0
FORCED_S = 1.0  # the same for a second Ctrl-C
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class DrainingServer(uvicorn.Server):
    """Tells the engine's loop of the first signal, at once: what has not begun is refused while the rest finishes.

    Until then the port stays open, so that /health and new requests are answered by 503.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_listen: Callable[[], None], on_interrupt: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_listen = on_listen
        self._on_interrupt = on_interrupt
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain_end_s = math.inf

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listen()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_first = not self.should_exit
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._on_loop(self._service.loop.hurry)
        if is_first and sig == signal.SIGINT:
            self._on_loop(self._on_interrupt)
        self.drain()

    async def on_tick(self, counter: int) -> bool:
        """Whether to close the port."""
        return await super().on_tick(counter) and self._is_drained()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # Left out by a second Ctrl-C, which is to end requests, not to leave the engine's thread running.
            await self.lifespan.shutdown()
            if self.server_state.tasks:
                # They tell their clients.
                await asyncio.wait(self.server_state.tasks, timeout=FORCED_S)

    def _is_drained(self) -> bool:
        return self.force_exit or self._service.loop.num_open == 0 or time.monotonic() > self._drain_end_s

    def drain(self) -> None:
        """Stop taking requests; from any thread."""
        self.should_exit = True
        shutdown_s = self._service.config.shutdown_s
        self._drain_end_s = min(self._drain_end_s, time.monotonic() + shutdown_s + CLOSING_S)
        self._on_loop(self._service.loop.drain, shutdown_s)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(function, *arguments)


def make_server(service: Service, *, on_listen: Callable[[], None] = lambda: None, on_interrupt: Callable[[], None] = lambda: None) -> DrainingServer:
    config = service.config
    return DrainingServer(
        uvicorn.Config(
            make_app(service),
            log_level=config.log_level,
            access_log=config.log_level in ("debug", "info"),
            lifespan="on",
            timeout_graceful_shutdown=int(CLOSING_S),
            server_header=False,
        ),
        service,
        on_listen,
        on_interrupt,
    )


def open_socket(config: ServerConfig) -> socket.socket:
    """Raises ConfigError where the port is taken, or the host is not this machine's."""
    try:
        infos = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; use another --port or --host, or 0") from error
    return listener


def serve(service: Service, *, on_listen: Callable[[str], None], on_interrupt: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT. `on_listen` is told the address once requests are taken, `on_interrupt` of the first SIGINT."""
    config = service.config
    listener = open_socket(config)
    if config.host not in LOOPBACK and config.api_key is None:
        log.warning("listening on %s without an API key: whoever reaches this machine can use the model", config.host)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = make_server(service, on_listen=lambda: on_listen(address), on_interrupt=on_interrupt)

    def stop(*_: object) -> None:
        """Before uvicorn's own handlers are there, and after: it raises a signal anew once it has stopped, and stopping in good order is no failure."""
        server.should_exit = True

    # uvloop's where it is installed.
    with stop_signals(stop), asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve([listener]))
