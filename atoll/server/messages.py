"""What the server and the engine tell each other across a process boundary: commands one way, reports the other; knows no HTTP and no tensor.

A message is a dataclass of plain data. `encode` makes bytes of it and `decode` the same message again.
"""

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.engine.constraint import Constraint
from atoll.engine.output import StreamPiece, TokenLogprobs
from atoll.engine.sampling import SamplingParams
from atoll.errors import AtollError
from atoll.models.tokenizer import Tokenizer
from atoll.offload.base import ConnectorStats


@dataclass(frozen=True)
class SequenceTask:
    """One sequence to generate."""

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    constraint: Constraint | None = None  # it crosses packed, and the engine's side unpacks it


# Commands to the engine. A ticket is one HTTP request; its sequences are numbered in the order of its tasks.


@dataclass(frozen=True)
class Add:
    ticket_id: int
    tasks: list[SequenceTask]


@dataclass(frozen=True)
class Abort:
    """End a ticket's sequences; answered by TicketEnded, whatever became of it meanwhile."""

    ticket_id: int


@dataclass(frozen=True)
class Refuse:
    """End every ticket, or those alone that have not begun."""

    only_unbegun: bool


@dataclass(frozen=True)
class Call:
    """Run what EngineWorker.calls has under this name, between two steps."""

    call_id: int
    name: str


@dataclass(frozen=True)
class Stop:
    """The last command: what is on its way to a tier has so many seconds to arrive."""

    drain_s: float = 0.0


Command = Add | Abort | Refuse | Call | Stop


# Reports of the engine


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the pool's pages that are neither free nor kept only for a later prefix
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    prefix_fetched: int = 0  # tokens, of these
    num_parked: int = 0  # requests that wait for a load
    offload: ConnectorStats | None = None  # None: there is no tier


@dataclass(frozen=True)
class EngineFacts:
    """What a server must know before the first report."""

    max_model_len: int  # tokens
    max_num_seqs: int
    vocab_size: int
    stats: EngineStats = EngineStats()  # as it began


@dataclass(frozen=True)
class Ready:
    """The first report of a process that has made its engine."""

    facts: EngineFacts
    tokenizer: Tokenizer


@dataclass(frozen=True)
class NotReady:
    """The first and last report of one that could not."""

    error: AtollError


@dataclass(frozen=True)
class StepDone:
    """One step; times in seconds of the monotonic clock, which the machine's processes share."""

    began_s: float
    ended_s: float
    begun: list[tuple[int, int]]  # (ticket id, sequence) of those whose first step this was
    pieces: list[tuple[int, StreamPiece]]  # with the ticket's id
    stats: EngineStats


@dataclass(frozen=True)
class TicketEnded:
    """What still ran of a ticket is gone."""

    ticket_id: int
    aborted: list[int]  # sequences
    error: AtollError | None  # what the client is told; None: it had asked for the end
    at_s: float
    stats: EngineStats


@dataclass(frozen=True)
class Answered:
    """A call's value, or the error that it raised."""

    call_id: int
    value: Any
    error: AtollError | None
    stats: EngineStats


@dataclass(frozen=True)
class Died:
    """The last report: nothing will be answered any more."""

    fault: str


Report = Ready | NotReady | StepDone | TicketEnded | Answered | Died


class _Pickler(pickle.Pickler):
    # Every token crosses in a piece: as its fields in order it takes a third of the time that a dataclass with slots takes by default.
    dispatch_table = copyreg.dispatch_table.copy()


def _by_fields(kind: type, *names: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (kind, tuple([getattr(value, name) for name in names]))


_Pickler.dispatch_table[StreamPiece] = _by_fields(StreamPiece, *StreamPiece.__slots__)
_Pickler.dispatch_table[TokenLogprobs] = _by_fields(TokenLogprobs, *TokenLogprobs.__slots__)


def encode(message: Command | Report) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The message of bytes that this program's own other half has made."""
    return pickle.loads(data)
