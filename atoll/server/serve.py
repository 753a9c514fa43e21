"""Serves a model until a signal comes, then lets what runs finish; knows no endpoint."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from atoll.config import ServerConfig
from atoll.errors import ConfigError
from atoll.server.app import make_app
from atoll.server.service import Service

log = logging.getLogger(__name__)

# Beyond the deadline, for the last bytes to leave.
CLOSING_S = 5.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class DrainingServer(uvicorn.Server):
    """Tells the engine's loop of the first signal, at once: what has not begun is refused while the rest finishes."""

    def __init__(self, config: uvicorn.Config, service: Service, on_listen: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_listen = on_listen
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listen()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.drain()

    def drain(self) -> None:
        """Stop taking requests; from any thread."""
        self.should_exit = True
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._service.loop.drain, self._service.config.shutdown_s)


def make_server(service: Service, *, on_listen: Callable[[], None] = lambda: None) -> DrainingServer:
    config = service.config
    return DrainingServer(
        uvicorn.Config(
            make_app(service),
            log_level=config.log_level,
            access_log=config.log_level in ("debug", "info"),
            lifespan="on",
            timeout_graceful_shutdown=int(config.shutdown_s + CLOSING_S) + 1,
            server_header=False,
        ),
        service,
        on_listen,
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


def serve(service: Service, *, on_listen: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `on_listen` is told the address once requests are taken."""
    config = service.config
    listener = open_socket(config)
    if config.host not in LOOPBACK and config.api_key is None:
        log.warning("listening on %s without an API key: whoever reaches this machine can use the model", config.host)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = make_server(service, on_listen=lambda: on_listen(address))
    # uvloop's where it is installed.
    with _quiet_signals(), asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve([listener]))


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises a signal anew once it has stopped, which would end the process by it: stopping in good order is no failure."""
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
