"""What the prefix cache has of a sequence's beginning, as one walk found it; knows no tree and no eviction."""

from collections import Counter
from dataclasses import dataclass

from atoll.kv.checkpoint import Checkpoint
from atoll.kv.prefix_stats import MissReason
from atoll.kv.prefix_tree import PrefixNode


@dataclass(frozen=True)
class Match:
    """What is known of a sequence's beginning."""

    num_tokens: int  # usable: up to the deepest boundary at which the pages, and for a model with states a checkpoint, are here
    pages: list[int]  # of these tokens
    checkpoint: Checkpoint | None  # at their end; None for a model without states, or with num_tokens 0
    num_indexed: int  # tokens of `resident`
    resident: tuple[PrefixNode, ...]  # the pages that are here, usable or not, but for the last page if it holds the last token
    num_held: int  # of `resident`, the first ones, that somebody holds
    next_digest: bytes | None  # of the page after them, which is missing; None: no more of the sequence could be reused
    is_pinned: bool  # the checkpoint
    num_evictable: int  # pages, those of the checkpoint too, that nobody holds: whoever acquires the match makes them unavailable
    misses: Counter[MissReason]  # the other tokens by reason


NO_MATCH = Match(0, [], None, 0, (), 0, None, False, 0, Counter())
