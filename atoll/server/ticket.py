"""One HTTP request's place at the engine: its sequences, and the pieces that come back for them; knows no HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from atoll.engine.constraint import Constraint
from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.sampling import SamplingParams
from atoll.errors import AtollError, GenerationError, UnavailableError

if TYPE_CHECKING:
    from atoll.server.engine_loop import EngineLoop


@dataclass(frozen=True)
class SequenceTask:
    """One sequence to generate."""

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    constraint: Constraint | None = None


class Ticket:
    """Made by EngineLoop.open; `with ticket:` closes it, which aborts whatever still runs."""

    def __init__(self, loop: "EngineLoop", num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.arrived_s = time.monotonic()
        self.is_closed = False
        self._loop = loop
        self._num_finished = 0
        self._pieces: list[StreamPiece] = []
        self._error: AtollError | None = None
        self._news = asyncio.Event()
        # Written by the engine's thread:
        self.request_ids: list[int] = []
        self.has_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether the last piece of every sequence has come."""
        return self._num_finished == self.num_sequences

    def submit(self, tasks: list[SequenceTask]) -> None:
        assert len(tasks) == self.num_sequences
        self._loop.submit(self, tasks)

    def put(self, piece: StreamPiece) -> None:
        self._num_finished += piece.finished
        if not self.is_closed:
            self._pieces.append(piece)
            self._news.set()

    def fail(self, error: AtollError) -> None:
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
