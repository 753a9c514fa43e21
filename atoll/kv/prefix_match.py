"""What the prefix cache has of a sequence's beginning, as one walk found it; knows no ledger and no eviction."""

from collections import Counter
from dataclasses import dataclass

from atoll.kv.checkpoint import Checkpoint
from atoll.kv.prefix_stats import MissReason
from atoll.kv.prefix_tree import PrefixNode, PrefixTree


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

    def stands(self, tree: PrefixTree) -> bool:
        """Whether the same pages and states would be found again, in the same hands, though perhaps with other reasons: cheaper than to walk again."""
        num_held, checkpoint, resident, num_usable = self.num_held, self.checkpoint, self.resident, len(self.pages)
        # Pages leave from the end, so where the last one is, all are; and whoever holds one holds those before it.
        return (
            (not resident or tree.get(resident[-1].digest) is resident[-1])
            and (self.next_digest is None or self.next_digest not in tree)
            and (num_held == 0 or resident[num_held - 1].is_held)
            and (num_held == len(resident) or not resident[num_held].is_held)
            and all(node.checkpoint is None for node in resident[num_usable:])
            and (checkpoint is None or (resident[num_usable - 1].checkpoint is checkpoint and self.is_pinned == (checkpoint.num_pins > 0)))
        )


NO_MATCH = Match(0, [], None, 0, (), 0, None, False, 0, Counter())
