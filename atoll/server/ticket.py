"""One HTTP request's place at the engine: its sequences, and the pieces that come back for them; knows no HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.sampling import SamplingParams
from atoll.errors import AtollError, GenerationError, UnavailableError

if TYPE_CHECKING:
    from atoll.server.engine_loop import EngineLoop


@dataclass(frozen=True)
class Job:
    """One sequence to generate."""

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


class Ticket:
    """Made by EngineLoop.open; `with ticket:` closes it, which aborts whatever still runs."""

    def __init__(self, loop: "EngineLoop", num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.arrived_s = time.monotonic()
        self.is_closed = False
        self._loop = loop
        self._num_finished = 0
        self._pieces: asyncio.Queue[StreamPiece | AtollError] = asyncio.Queue()
        # Written by the engine's thread:
        self.request_ids: list[int] = []
        self.has_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether the last piece of every sequence has come."""
        return self._num_finished == self.num_sequences

    def submit(self, jobs: list[Job]) -> None:
        assert len(jobs) == self.num_sequences
        self._loop.submit(self, jobs)

    def put(self, piece: StreamPiece) -> None:
        self._num_finished += piece.finished
        if not self.is_closed:
            self._pieces.put_nowait(piece)

    def fail(self, error: AtollError) -> None:
        self._pieces.put_nowait(error)

    async def pieces(self) -> AsyncIterator[StreamPiece]:
        """Pieces of all sequences as they come, until each has finished. Raises what ended one that did not finish well."""
        num_left = self.num_sequences
        while num_left:
            piece = await self._pieces.get()
            if isinstance(piece, AtollError):
                raise piece
            if piece.output is not None:
                num_left -= 1
                if piece.output.finish_reason == "error":
                    raise GenerationError(piece.output.error or "the request failed; look into the server's log")
                if piece.output.finish_reason == "abort":
                    raise UnavailableError("the request was aborted; send it again")
            yield piece

    async def outputs(self) -> list[RequestOutput]:
        """All outputs, in the order of the jobs."""
        outputs = {piece.index: piece.output async for piece in self.pieces() if piece.output is not None}
        return [outputs[index] for index in range(self.num_sequences)]

    def close(self) -> None:
        self.is_closed = True
        self._loop.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
