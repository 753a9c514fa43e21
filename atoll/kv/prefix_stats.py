"""What the prefix cache did and did not spare: tokens looked up, reused, and missed by reason; knows no page."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

MAX_REMEMBERED = 65_536  # digests of what was evicted; they only tell why a token was missed


class MissReason(StrEnum):
    """Why a token of a prompt is computed although tokens are reused; each such token has one reason."""

    NOT_INDEXED = "not_indexed"  # never computed after this prefix, or not in a page that is full
    EVICTED = "evicted"  # its page, or a checkpoint at or after it, was here and had to go
    NO_CHECKPOINT = "no_checkpoint"  # its page is here, and no state at or after it ever was
    NOT_YET_COPIED = "not_yet_copied"  # its page is here; a running request is about to leave a state at or after it
    SCORED = "scored"  # the prompt's log probabilities were asked for, so nothing was looked up
    LAST_TOKEN = "last_token"  # its page is here and holds the prompt's last token, which must be computed to be followed by another


@dataclass
class PrefixStats:
    """Sums since the engine began, or since the last reset of the statistics. A request counts once, at its first admission."""

    num_queries: int = 0  # prompt tokens looked up
    num_hits: int = 0  # prompt tokens reused; num_queries = num_hits + the sum of misses
    num_fetched: int = 0  # of num_hits, those that a connector brought back
    misses: Counter[MissReason] = field(default_factory=Counter)  # prompt tokens by reason
    num_resumed: int = 0  # tokens that preempted requests did not compute again
    num_saved_checkpoints: int = 0
    num_refused_checkpoints: int = 0  # the pool was full of what is worth more
    num_evicted_checkpoints: int = 0  # to make room; one that a request replaces by its next is not counted
    num_evicted_pages: int = 0  # of rows

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were reused; None before the first."""
        return self.num_hits / self.num_queries if self.num_queries else None


def remember(gone: dict[bytes, None], digest: bytes) -> None:
    """Keep a digest, and no more than MAX_REMEMBERED of them."""
    gone.pop(digest, None)
    gone[digest] = None
    if len(gone) > MAX_REMEMBERED:
        del gone[next(iter(gone))]
