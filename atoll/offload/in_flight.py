"""What the tiers' scheduler side has begun and not heard of yet: loads, stores and moves, with the blobs that each of them pins; decides nothing."""

from dataclasses import dataclass, field

from atoll.offload.base import Transfer
from atoll.offload.lru import Blob
from atoll.offload.moves import Move


@dataclass(eq=False, slots=True)
class Load:
    """A load that was accepted, and has not ended."""

    transfer: Transfer
    blobs: list[Blob | None]  # for each span; None: it is lost, and will not arrive
    waits_for: set[int] = field(default_factory=set)  # generations of moves
    is_sent: bool = False
    error: str | None = None  # why a blob was lost


@dataclass(eq=False, slots=True)
class Store:
    """The same of a store."""

    transfer: Transfer
    blobs: list[Blob]
    is_sent: bool = False


@dataclass(eq=False, slots=True)
class FileMove:
    """A move between the tiers, or within one, and the blobs that it pins."""

    move: Move
    host: Blob
    disk: Blob | None = None
