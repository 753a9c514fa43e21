"""Runs the engine on a thread of its own and carries requests in and pieces out; knows no HTTP and no text.

Two threads meet here. The *engine thread* alone touches the engine: it takes commands from an inbox between steps. The *event loop* alone touches tickets: what
a step yielded is handed to it once per step, so that no client, however slow, is waited for. `_on_engine_` and `_on_loop_` say which thread runs a method.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from atoll.engine.engine import Engine
from atoll.engine.output import StreamPiece
from atoll.errors import AtollError, OverloadedError, RequestError, UnavailableError
from atoll.server.metrics import EngineStats, ServerMetrics, Timing
from atoll.server.ticket import SequenceTask, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RETRY_AFTER_S = 60


class _Sequence:
    """What the engine thread knows of a sequence beside the engine."""

    def __init__(self, ticket: Ticket, timing: Timing) -> None:
        self.ticket = ticket
        self.timing = timing


class EngineLoop:
    """The engine's thread and its inbox.

    Sequences past `max_queued` more than a step holds are refused with OverloadedError. When a step raises, the engine is dead: every open ticket fails with
    UnavailableError, and so does every later one.
    """

    def __init__(self, engine: Engine, *, max_queued: int, metrics: ServerMetrics) -> None:
        self.max_open = engine.scheduler.config.max_num_seqs + max_queued  # sequences
        self._engine = engine
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="atoll-engine", daemon=True)
        self._fault: str | None = None  # why nothing is taken any more
        self._dead = False
        # Of the engine thread:
        self._sequences: dict[int, _Sequence] = {}  # by request id
        self._last_queue_s = 0.0
        # Of the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: set[Ticket] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._num_open = 0  # sequences

    @property
    def fault(self) -> str | None:
        """Why nothing is taken: the engine has died, or is stopping; None: all is well."""
        if self._fault is None and self._loop is not None and not self._thread.is_alive():
            return "the engine's thread has ended"
        return self._fault

    @property
    def num_open(self) -> int:
        """Sequences that are ticketed and not closed."""
        return self._num_open

    @property
    def is_dead(self) -> bool:
        return self._dead

    def start(self) -> None:
        """Start the thread; what it yields goes to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def open(self, num_sequences: int) -> Ticket:
        """A place for so many sequences; close the ticket, whatever happens. Raises RequestError, OverloadedError or UnavailableError."""
        self._check_fault()
        if num_sequences > self.max_open:
            raise RequestError(f"sequences asked for at once: {num_sequences}, {self.max_open} is the limit; send fewer prompts, or a smaller n")
        if self._num_open + num_sequences > self.max_open:
            wait_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._last_queue_s)))
            raise OverloadedError(
                f"open sequences: {self._num_open}, and {num_sequences} more would pass {self.max_open}, the limit; try again in {wait_s} s", wait_s
            )
        ticket = Ticket(self, num_sequences)
        self._tickets.add(ticket)
        self._num_open += num_sequences
        return ticket

    def submit(self, ticket: Ticket, tasks: list[SequenceTask]) -> None:
        """Queue a ticket's sequences; piece.index counts them."""
        self._check_fault()
        self._inbox.put(lambda: self._on_engine_add(ticket, tasks))

    def close(self, ticket: Ticket) -> None:
        """Give a ticket's place back; what still runs of it is aborted."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._num_open -= ticket.num_sequences
            if not ticket.is_complete:
                self._inbox.put(lambda: self._on_engine_abort(ticket))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function between two steps, on the engine's thread. Raises what it raises, or UnavailableError."""
        self._check_fault()
        done: Future[T] = Future()
        self._inbox.put(lambda: _resolve(done, function, self._engine))
        waiting = asyncio.wrap_future(done)
        self._calls.add(waiting)
        try:
            return await waiting
        finally:
            self._calls.discard(waiting)

    def drain(self, deadline_s: float) -> None:
        """Take nothing new, refuse what has not begun, and abort what still runs after the deadline."""
        if self._fault is None and self._loop is not None:
            self._fault = "the server is stopping; send the request elsewhere, or again in a while"
            self._inbox.put(lambda: self._on_engine_refuse(only_unbegun=True))
            self._loop.call_later(deadline_s, self._inbox.put, lambda: self._on_engine_refuse(only_unbegun=False))

    async def stop(self) -> None:
        """Abort everything and end the thread."""
        self._fault = self._fault or "the server is stopping"
        self._inbox.put(lambda: self._on_engine_refuse(only_unbegun=False))
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        # What the thread handed over last.
        await asyncio.sleep(0)

    def _check_fault(self) -> None:
        if (fault := self.fault) is not None:
            raise UnavailableError(fault)

    def _run(self) -> None:
        try:
            while self._on_engine_serve_inbox():
                self._on_engine_step()
        except Exception as error:
            log.exception("the engine has died")
            self._on_engine_die(f"the engine has died: {type(error).__name__}: {error}; restart the server")

    def _on_engine_serve_inbox(self) -> bool:
        """Run what has come in, waiting for it while there is nothing else to do; False: the end."""
        waits = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=waits)
            except queue.Empty:
                return True
            if command is None:
                return False
            waits = False
            command()
            self._on_engine_publish()

    def _on_engine_step(self) -> None:
        if not self._engine.has_work:
            return
        began_s = time.monotonic()
        pieces = self._engine.step()
        now_s = time.monotonic()
        for request in self._engine.scheduler.running:
            self._on_engine_note_begun(self._sequences[request.request_id], began_s)
        deliveries: list[tuple[Ticket, StreamPiece]] = []
        for piece in pieces:
            sequence = self._sequences[piece.request_id]
            self._on_engine_note_begun(sequence, began_s)
            self._metrics.note_piece(sequence.timing, piece, now_s)
            deliveries.append((sequence.ticket, piece))
            if piece.finished:
                del self._sequences[piece.request_id]
        self._on_engine_publish()
        if deliveries:
            self._tell_loop(self._on_loop_deliver, deliveries)

    def _on_engine_note_begun(self, sequence: _Sequence, at_s: float) -> None:
        if sequence.timing.begun_s is None:
            sequence.timing.begun_s = at_s
            sequence.ticket.has_begun = True
            self._last_queue_s = at_s - sequence.timing.arrived_s
            self._metrics.note_begun(sequence.timing)

    def _on_engine_publish(self) -> None:
        self._metrics.engine = EngineStats.of(self._engine)

    def _on_engine_add(self, ticket: Ticket, tasks: list[SequenceTask]) -> None:
        if ticket.is_closed:
            return
        try:
            for index, task in enumerate(tasks):
                request_id = self._engine.add(task.token_ids, task.params, index=index, cache_salt=task.cache_salt, constraint=task.constraint)
                self._sequences[request_id] = _Sequence(ticket, Timing(ticket.arrived_s, len(task.token_ids)))
                ticket.request_ids.append(request_id)
        except AtollError as error:
            self._on_engine_fail(ticket, error)
        except Exception as error:
            log.exception("a request could not be queued")
            self._on_engine_fail(ticket, UnavailableError(f"the request could not be queued: {type(error).__name__}: {error}"))

    def _on_engine_fail(self, ticket: Ticket, error: AtollError) -> None:
        self._on_engine_abort(ticket)
        self._tell_loop(ticket.fail, error)

    def _on_engine_abort(self, ticket: Ticket) -> None:
        for request_id in ticket.request_ids:
            if request_id in self._sequences:
                sequence = self._sequences.pop(request_id)
                output = self._engine.abort(request_id)
                if output is not None:
                    self._metrics.note_end(sequence.timing, output, time.monotonic())

    def _on_engine_refuse(self, *, only_unbegun: bool) -> None:
        message = "the server is stopping, and this request " + ("had not begun; send it again in a while" if only_unbegun else "did not finish in time")
        for ticket in {sequence.ticket for sequence in self._sequences.values()}:
            if not (only_unbegun and ticket.has_begun):
                self._on_engine_fail(ticket, UnavailableError(message))

    def _on_engine_die(self, fault: str) -> None:
        self._fault = fault
        self._dead = True
        self._tell_loop(self._on_loop_fail_all, fault)

    def _tell_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    def _on_loop_deliver(self, deliveries: list[tuple[Ticket, StreamPiece]]) -> None:
        for ticket, piece in deliveries:
            ticket.put(piece)

    def _on_loop_fail_all(self, fault: str) -> None:
        for ticket in self._tickets:
            ticket.fail(UnavailableError(fault))
        for call in self._calls:
            if not call.done():
                call.set_exception(UnavailableError(fault))


def _resolve(done: "Future[T]", function: Callable[[Engine], T], engine: Engine) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(function(engine))
    except AtollError as error:
        done.set_exception(error)
