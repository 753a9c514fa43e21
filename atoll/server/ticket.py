"""One HTTP request's place at the engine: its sequences, and the pieces that come back for them; knows no HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from atoll.engine.output import RequestOutput, StreamPiece
from atoll.errors import AtollError, GenerationError, UnavailableError
from atoll.server.messages import SequenceTask
from atoll.server.metrics import Timing

if TYPE_CHECKING:
    from atoll.server.engine_loop import EngineLoop


class Ticket:
    """Made by EngineLoop.open; `with ticket:` closes it, which aborts whatever still runs."""

    def __init__(self, loop: "EngineLoop", ticket_id: int, num_sequences: int) -> None:
        self.ticket_id = ticket_id
        self.num_sequences = num_sequences
        self.arrived_s = time.monotonic()
        self.timings: list[Timing] = []  # of its sequences, once they are submitted
        self.is_closed = False
        self.is_over = False  # the engine holds nothing of it
        self._loop = loop
        self._num_unfinished = num_sequences
        self._pieces: list[StreamPiece] = []
        self._error: AtollError | None = None
        self._news = asyncio.Event()

    def submit(self, tasks: list[SequenceTask]) -> None:
        assert len(tasks) == self.num_sequences
        self.timings = [Timing(self.arrived_s, len(task.token_ids)) for task in tasks]
        self._loop.submit(self, tasks)

    def put(self, piece: StreamPiece) -> None:
        if piece.output is not None:
            self._num_unfinished -= 1
            self.is_over = not self._num_unfinished
        if not self.is_closed:
            self._pieces.append(piece)
            self._news.set()

    def fail(self, error: AtollError) -> None:
        self.is_over = True
        self._error = self._error or error
        self._news.set()

    async def batches(self) -> AsyncIterator[list[StreamPiece]]:
        """Pieces of all sequences, at each time those that have come since, until each has finished. Raises what ended one that did not finish well."""
        num_left = self.num_sequences
        while num_left:
            await self._news.wait()
            self._news.clear()
            pieces, self._pieces = self._pieces, []
            # What is good goes out before the error is told.
            good, error = _until_error(pieces, self._error)
            if good:
                yield good
            if error is not None:
                raise error
            num_left -= sum(piece.finished for piece in good)

    async def outputs(self) -> list[RequestOutput]:
        """All outputs, in the order of the tasks."""
        outputs = {piece.index: piece.output async for pieces in self.batches() for piece in pieces if piece.output is not None}
        return [outputs[index] for index in range(self.num_sequences)]

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._loop.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _until_error(pieces: list[StreamPiece], error: AtollError | None) -> tuple[list[StreamPiece], AtollError | None]:
    """The pieces before the first that ends badly, and that error; or all of them, and the ticket's own."""
    for at, piece in enumerate(pieces):
        if piece.output is not None and piece.output.finish_reason == "error":
            return pieces[:at], GenerationError(piece.output.error or "the request failed; look into the server's log")
        if piece.output is not None and piece.output.finish_reason == "abort":
            return pieces[:at], UnavailableError("the request was aborted; send it again")
    return pieces, error
