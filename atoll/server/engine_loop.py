"""The engine as the event loop sees it: tickets given out, commands sent, reports handed to those they concern; knows no HTTP and no text.

Everything here runs on the event loop but `_on_report`, which the link's thread calls: no client, however slow, is waited for.
"""

import asyncio
import itertools
import logging
import math
import time
from dataclasses import replace
from typing import Any

from atoll.errors import OverloadedError, RequestError, UnavailableError
from atoll.server.engine_process import EngineLink
from atoll.server.messages import Abort, Add, Answered, Call, Died, Refuse, Report, SequenceTask, StepDone, Stop, TicketEnded
from atoll.server.metrics import ServerMetrics
from atoll.server.ticket import Ticket

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60


class EngineLoop:
    """Gives out tickets, and keeps those of which the engine may still report.

    Sequences past `max_queued` more than a step holds are refused with OverloadedError. When the engine dies every open ticket fails with UnavailableError,
    and so does every later one.
    """

    def __init__(self, link: EngineLink, *, max_queued: int, metrics: ServerMetrics) -> None:
        self.max_open = link.facts.max_num_seqs + max_queued  # sequences
        self._link = link
        self._metrics = metrics
        metrics.engine = link.facts.stats
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault: str | None = None  # why nothing is taken any more
        self._dead = False
        self._is_ending = False
        self._num_open = 0  # sequences
        self._last_queue_s = 0.0
        self._deadline_s = -math.inf  # of the monotonic clock, for what has to end before the engine does
        self._ids = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}

    @property
    def fault(self) -> str | None:
        """Why nothing is taken: the engine has died, or is stopping; None: all is well."""
        return self._fault

    @property
    def num_open(self) -> int:
        """Sequences that are ticketed and not closed."""
        return self._num_open

    @property
    def is_dead(self) -> bool:
        return self._dead

    def start(self) -> None:
        """Take the link's reports from now on, on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._link.start(self._on_report)

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
        ticket = Ticket(self, next(self._ids), num_sequences)
        self._tickets[ticket.ticket_id] = ticket
        self._num_open += num_sequences
        return ticket

    def submit(self, ticket: Ticket, tasks: list[SequenceTask]) -> None:
        """Queue a ticket's sequences; piece.index counts them."""
        self._check_fault()
        self._link.put(Add(ticket.ticket_id, tasks))

    def close(self, ticket: Ticket) -> None:
        """Give a ticket's place back; what still runs of it is aborted."""
        self._num_open -= ticket.num_sequences
        if ticket.is_over or not ticket.timings:
            self._tickets.pop(ticket.ticket_id, None)
        else:
            # Kept until the engine has told what became of it.
            self._link.put(Abort(ticket.ticket_id))

    async def call(self, name: str) -> Any:
        """Run one of EngineWorker.calls between two steps. Raises what it raises, or UnavailableError."""
        self._check_fault()
        call_id = next(self._ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._link.put(Call(call_id, name))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def drain(self, deadline_s: float) -> None:
        """Take nothing new, refuse what has not begun, and abort what still runs after the deadline."""
        if self._fault is None and self._loop is not None:
            self._fault = "the server is stopping; send the request elsewhere, or again in a while"
            self._deadline_s = time.monotonic() + deadline_s
            self._link.put(Refuse(only_unbegun=True))
            self._loop.call_later(deadline_s, self._link.put, Refuse(only_unbegun=False))

    def hurry(self) -> None:
        """The deadline is now; an engine that ends already is not waited for: what it has not written whole is absent."""
        self._deadline_s = -math.inf
        if self._is_ending:
            self._link.cut()

    async def stop(self) -> None:
        """Abort everything and end the engine; until the deadline, pages that are on their way to a tier may still arrive."""
        self._fault = self._fault or "the server is stopping"
        self._link.put(Refuse(only_unbegun=False))
        self._is_ending = True
        self._link.put(Stop(max(0.0, self._deadline_s - time.monotonic())))
        await asyncio.to_thread(self._link.join)
        # What the engine reported last.
        await asyncio.sleep(0)

    def _check_fault(self) -> None:
        if (fault := self.fault) is not None:
            raise UnavailableError(fault)

    def _on_report(self, report: Report) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, report)

    def _take(self, report: Report) -> None:
        match report:
            case StepDone():
                self._take_step(report)
            case TicketEnded():
                self._take_end(report)
            case Answered(call_id, value, error):
                self._metrics.engine = report.stats
                if (waiting := self._calls.get(call_id)) is not None and not waiting.done():
                    waiting.set_result(value) if error is None else waiting.set_exception(error)
            case Died(fault):
                self._die(fault)

    def _take_step(self, step: StepDone) -> None:
        self._metrics.engine = step.stats
        for ticket_id, index in step.begun:
            timing = self._tickets[ticket_id].timings[index]
            self._last_queue_s = step.began_s - timing.arrived_s
            self._metrics.note_begun(timing, step.began_s)
        for ticket_id, piece in step.pieces:
            ticket = self._tickets[ticket_id]
            self._metrics.note_piece(ticket.timings[piece.index], piece, step.ended_s)
            ticket.put(piece)

    def _take_end(self, end: TicketEnded) -> None:
        self._metrics.engine = end.stats
        ticket = self._tickets.get(end.ticket_id)
        if ticket is None:
            return
        for index in end.aborted:
            self._metrics.note_end(ticket.timings[index], "abort", end.at_s)
        if end.error is not None:
            ticket.fail(end.error)
        if ticket.is_closed:
            del self._tickets[end.ticket_id]

    def _die(self, fault: str) -> None:
        if self._dead:
            # The engine has told why, and now its process has ended.
            return
        log.error("%s", fault)
        self._fault = fault
        self._dead = True
        self._metrics.engine = replace(self._metrics.engine, num_running=0, num_waiting=0, num_parked=0, kv_cache_usage=0.0)
        now_s = time.monotonic()
        for ticket in self._tickets.values():
            for timing in ticket.timings:
                if not timing.has_ended:
                    self._metrics.note_end(timing, "error", now_s)
            ticket.fail(UnavailableError(fault))
        self._tickets = {ticket_id: ticket for ticket_id, ticket in self._tickets.items() if not ticket.is_closed}
        for call in self._calls.values():
            if not call.done():
                call.set_exception(UnavailableError(fault))
