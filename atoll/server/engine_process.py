"""The engine in a process of its own: started, spoken to, and found out when it ends; knows no request."""

import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol, Self

from atoll.config import EngineConfig
from atoll.errors import AtollError, UnavailableError
from atoll.models.tokenizer import Tokenizer
from atoll.server.messages import Command, Died, EngineFacts, NotReady, Ready, Report, Stop, decode, encode
from atoll.server.signals import blocked_stop_signals, ignore_stop_signals

if TYPE_CHECKING:
    from atoll.server.engine_worker import EngineWorker

log = logging.getLogger(__name__)

# After the last command and the time that it gives for pages on their way to a tier; a step of the largest model takes less than one.
STOP_S = 10.0


class EngineLink(Protocol):
    """A running engine, wherever it is."""

    facts: EngineFacts
    tokenizer: Tokenizer

    def start(self, on_report: Callable[[Report], None]) -> None:
        """Reports go to `on_report`, on a thread of the link's own; the last one is Died where the engine ends unasked."""
        ...

    def put(self, command: Command) -> None:
        """Waits for nothing."""
        ...

    def join(self) -> None:
        """Wait for the end after Stop."""
        ...

    def cut(self) -> None:
        """End now, whatever it does; waits for nothing."""
        ...


class EngineProcess:
    """An EngineLink to a process that loads a model and runs its engine. `with` ends the process, by force where nothing else has.

    Raises what loading raises, and UnavailableError where the process ends before it is ready.
    """

    facts: EngineFacts
    tokenizer: Tokenizer

    def __init__(self, model: str, config: EngineConfig, *, log_level: str = "warning") -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_engine, args=(theirs, model, config, log_level), name="atoll-engine", daemon=True)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_stopping = False
        self._stop_s = STOP_S
        # It lets both signals through when it starts.
        resource_tracker.ensure_running()
        with blocked_stop_signals():
            self._process.start()
        theirs.close()

    def wait_until_ready(self) -> Self:
        try:
            first: Ready | NotReady = decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            first = NotReady(UnavailableError(self._end()))
        if isinstance(first, NotReady):
            raise first.error
        self.facts, self.tokenizer = first.facts, first.tokenizer
        return self

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, on_report: Callable[[Report], None]) -> None:
        # A thread for each way: neither a full pipe nor a large message holds up who puts a command in.
        self._threads = [threading.Thread(target=self._send, daemon=True), threading.Thread(target=self._receive, args=(on_report,), daemon=True)]
        for thread in self._threads:
            thread.start()

    def put(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._is_stopping = True
            self._stop_s = STOP_S + command.drain_s
        self._commands.put(command)

    def join(self) -> None:
        self._process.join(self._stop_s)
        self.kill()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        # Ends the thread that sends.
        self._commands.put(Stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _send(self) -> None:
        command: Command | None = None
        try:
            while not isinstance(command, Stop):
                command = self._commands.get()
                self._connection.send_bytes(encode(command))
        except OSError:
            # It has ended, as the other thread tells.
            pass
        except Exception:
            log.exception("a command could not be sent")
            self._process.kill()

    def _receive(self, on_report: Callable[[Report], None]) -> None:
        try:
            while True:
                on_report(decode(self._connection.recv_bytes()))
        except (EOFError, OSError):
            if not self._is_stopping:
                on_report(Died(self._end()))

    def _end(self) -> str:
        self._process.join(STOP_S)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"the engine's process has ended with {how}; look into the log, and restart the server"


def _run_engine(connection: Connection, model: str, config: EngineConfig, log_level: str) -> None:
    """What the process does. Ctrl-C and a service manager's SIGTERM reach all processes, and the server decides what they mean."""
    ignore_stop_signals()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    workers: list[EngineWorker] = []

    def receive() -> None:
        try:
            while True:
                # No command comes before Ready has been told.
                command = decode(connection.recv_bytes())
                workers[0].put(command)
        except (EOFError, OSError):
            # The server is gone, and nobody wants anything of this process; a model that is being loaded is no reason to stay.
            os._exit(1)

    def tell(report: Report) -> None:
        # Where the server is gone, the other thread ends the process.
        with suppress(OSError):
            connection.send_bytes(encode(report))

    threading.Thread(target=receive, daemon=True).start()
    try:
        worker = _make_worker(model, config, tell)
    except AtollError as error:
        tell(NotReady(error))
    except Exception as error:
        log.exception("the engine could not be made")
        tell(NotReady(UnavailableError(f"the engine could not be made: {type(error).__name__}: {error}; look into the log")))
    else:
        workers.append(worker)
        tell(Ready(worker.facts, worker.tokenizer))
        worker.run()


def _make_worker(model: str, config: EngineConfig, tell: Callable[[Report], None]) -> "EngineWorker":
    # Here and not above: the server's own process needs none of them.
    from atoll.engine.build import choose_device, choose_dtype, make_engine
    from atoll.models.loader import load_model
    from atoll.server.engine_worker import EngineWorker

    loaded = load_model(model, device=choose_device(config.device), dtype=choose_dtype(config.dtype))
    return EngineWorker(make_engine(loaded.model, loaded.config, loaded.tokenizer, config), loaded.tokenizer, tell)
