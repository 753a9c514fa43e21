"""Runs: pairs of pool pages and host pages joined where both sides are adjacent, so that each run is one contiguous copy; knows no memory and no device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    """`lengths[i]` pages from pool page `pages[i]` and from host page `slots[i]` on; all three [N] int64."""

    pages: np.ndarray
    slots: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_pages(self) -> int:
        return int(self.lengths.sum())


def make_runs(pages: Sequence[int], slots: Sequence[int]) -> Runs:
    """The fewest runs for these pairs, whose order does not matter: no page and no slot is named twice."""
    assert len(pages) == len(slots) > 0, f"{len(pages)} pages and {len(slots)} slots are no pairs"
    all_pages, all_slots = np.asarray(pages, dtype=np.int64), np.asarray(slots, dtype=np.int64)
    # A pool gives its pages in any order, often from the last to the first: in order of the slots such pairs are adjacent too.
    order = np.argsort(all_slots)
    all_pages, all_slots = all_pages[order], all_slots[order]
    is_first = np.ones(len(pages), dtype=bool)
    is_first[1:] = (np.diff(all_pages) != 1) | (np.diff(all_slots) != 1)
    firsts = np.flatnonzero(is_first)
    return Runs(all_pages[firsts], all_slots[firsts], np.diff(firsts, append=len(pages)))
