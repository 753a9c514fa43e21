"""The engine's side of the server: takes commands between steps, reports each step; knows no HTTP, no client and no process."""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.engine.engine import Engine
from atoll.errors import AtollError, UnavailableError
from atoll.models.tokenizer import Tokenizer
from atoll.server.grammars import Grammars, PackedConstraint
from atoll.server.messages import (
    Abort,
    Add,
    Answered,
    Call,
    Command,
    Died,
    EngineFacts,
    EngineStats,
    Refuse,
    Report,
    SequenceTask,
    StepDone,
    Stop,
    TicketEnded,
)
from atoll.server.pool_view import PoolView

log = logging.getLogger(__name__)


@dataclass
class _Ticket:
    """An HTTP request whose sequences wait or run."""

    request_ids: dict[int, int] = field(default_factory=dict)  # of those that have not ended, with their sequence
    has_begun: bool = False


class EngineWorker:
    """Runs an engine on the thread that calls `run`; that thread alone touches it. `put` may be called by another."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, tell: Callable[[Report], None]) -> None:
        self.calls: dict[str, Callable[[Engine], Any]] = {"reset_prefix_cache": Engine.reset_prefix_cache, "pool_view": PoolView.of}
        self.tokenizer = tokenizer
        self._engine = engine
        self._tell = tell
        self._grammars = Grammars(tokenizer, engine.vocab_size)
        self._inbox: queue.SimpleQueue[Command | _Misfit] = queue.SimpleQueue()
        self._tickets: dict[int, _Ticket] = {}
        self._ticket_ids: dict[int, int] = {}  # by request id
        self._unbegun: set[int] = set()  # request ids
        self._drain_s = 0.0  # at the end

    @property
    def facts(self) -> EngineFacts:
        config = self._engine.scheduler.config
        return EngineFacts(config.max_model_len, config.max_num_seqs, self._engine.vocab_size, self._stats())

    def put(self, command: Command) -> None:
        """Queue a command. A packed constraint is unpacked here, on the caller's thread, which for a large vocabulary takes longer than a step."""
        try:
            self._inbox.put(_unpacked(command, self._grammars) if isinstance(command, Add) else command)
        except Exception as error:
            log.exception("a request could not be queued")
            self._inbox.put(_Misfit(command, _could_not_queue(error)))

    def run(self) -> None:
        """Until Stop, or until the engine dies, which is told."""
        try:
            while self._serve_inbox():
                self._step()
            self._engine.close(self._drain_s)
        except Exception as error:
            log.exception("the engine has died")
            self._tell(Died(f"the engine has died: {type(error).__name__}: {error}; restart the server"))

    def _serve_inbox(self) -> bool:
        """Run what has come in, waiting for it while there is nothing else to do; False: the end."""
        waits = not self._has_steps
        while True:
            try:
                command = self._inbox.get(block=waits)
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                self._drain_s = command.drain_s
                return False
            waits = False
            self._serve(command)

    def _serve(self, command: "Command | _Misfit") -> None:
        match command:
            case Add(ticket_id, tasks):
                self._add(ticket_id, tasks)
            case _Misfit(Add(ticket_id, _), error):
                self._end(ticket_id, error)
            case Abort(ticket_id):
                self._end(ticket_id, None)
            case Refuse(only_unbegun):
                self._refuse(only_unbegun=only_unbegun)
            case Call(call_id, name):
                self._call(call_id, name)

    @property
    def _has_steps(self) -> bool:
        """Whether a step would do anything, if only for pages on their way to a tier."""
        return self._engine.has_work or self._engine.has_pending_transfers

    def _step(self) -> None:
        engine = self._engine
        if not self._has_steps:
            return
        was_pending = engine.has_pending_transfers
        began_s = time.monotonic()
        pieces = engine.step()
        ended_s = time.monotonic()
        begun = []
        if self._unbegun:
            # One that ended in its first step runs no more.
            ids = {request.request_id for request in engine.scheduler.running} | {piece.request_id for piece in pieces}
            begun = [self._begin(request_id) for request_id in sorted(self._unbegun & ids)]
        told = [(self._ticket_ids[piece.request_id], piece) for piece in pieces]
        for ticket_id, piece in told:
            if piece.finished:
                self._forget(ticket_id, piece.request_id)
        has_settled = was_pending and not engine.has_pending_transfers  # which nobody else would tell of
        if told or begun or has_settled:
            self._tell(StepDone(began_s, ended_s, begun, told, self._stats()))

    def _begin(self, request_id: int) -> tuple[int, int]:
        self._unbegun.discard(request_id)
        ticket_id = self._ticket_ids[request_id]
        self._tickets[ticket_id].has_begun = True
        return ticket_id, self._tickets[ticket_id].request_ids[request_id]

    def _forget(self, ticket_id: int, request_id: int) -> None:
        self._unbegun.discard(request_id)
        del self._ticket_ids[request_id]
        ticket = self._tickets[ticket_id]
        del ticket.request_ids[request_id]
        if not ticket.request_ids:
            del self._tickets[ticket_id]

    def _add(self, ticket_id: int, tasks: list[SequenceTask]) -> None:
        ticket = self._tickets[ticket_id] = _Ticket()
        try:
            for index, task in enumerate(tasks):
                request_id = self._engine.add(task.token_ids, task.params, index=index, cache_salt=task.cache_salt, constraint=task.constraint)
                ticket.request_ids[request_id] = index
                self._ticket_ids[request_id] = ticket_id
                self._unbegun.add(request_id)
        except AtollError as error:
            self._end(ticket_id, error)
        except Exception as error:
            log.exception("a request could not be queued")
            self._end(ticket_id, _could_not_queue(error))

    def _end(self, ticket_id: int, error: AtollError | None) -> None:
        ticket = self._tickets.pop(ticket_id, _Ticket())
        for request_id in ticket.request_ids:
            self._unbegun.discard(request_id)
            del self._ticket_ids[request_id]
            self._engine.abort(request_id)
        self._tell(TicketEnded(ticket_id, list(ticket.request_ids.values()), error, time.monotonic(), self._stats()))

    def _refuse(self, *, only_unbegun: bool) -> None:
        message = "the server is stopping, and this request " + ("had not begun; send it again in a while" if only_unbegun else "did not finish in time")
        for ticket_id, ticket in list(self._tickets.items()):
            if not (only_unbegun and ticket.has_begun):
                self._end(ticket_id, UnavailableError(message))

    def _call(self, call_id: int, name: str) -> None:
        value, error = None, None
        try:
            value = self.calls[name](self._engine)
        except AtollError as raised:
            error = raised
        self._tell(Answered(call_id, value, error, self._stats()))

    def _stats(self) -> EngineStats:
        engine = self._engine
        scheduler, prefix = engine.scheduler, engine.prefix_stats
        usage = 1 - scheduler.cache.num_available / scheduler.ledger.num_usable
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=usage,
            num_steps=engine.num_steps,
            num_preemptions=engine.num_preemptions,
            prefix_queries=prefix.num_queries,
            prefix_hits=prefix.num_hits,
            prefix_fetched=prefix.num_fetched,
            num_parked=engine.num_parked,
            offload=engine.offload_stats,
        )


@dataclass(frozen=True)
class _Misfit:
    """A command that could not be taken, and why."""

    command: Command
    error: AtollError


def _could_not_queue(error: Exception) -> AtollError:
    return UnavailableError(f"the request could not be queued: {type(error).__name__}: {error}")


def _unpacked(add: Add, grammars: Grammars) -> Add:
    tasks = [replace(task, constraint=grammars.unpack(task.constraint)) if isinstance(task.constraint, PackedConstraint) else task for task in add.tasks]
    return replace(add, tasks=tasks)
