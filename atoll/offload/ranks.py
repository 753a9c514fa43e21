"""Joins what the workers of several ranks report: over ranks, one failure is everybody's miss; knows no process and no device."""

from collections.abc import Sequence
from itertools import zip_longest

from atoll.offload.base import Completion


class RankReports:
    """One scheduler side's view of `num_ranks` workers, each of which moves its own part of every blob.

    A transfer has ended when every rank has told of it, and a span arrived if it arrived everywhere.
    """

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks > 0
        self._num_ranks = num_ranks
        self._lost: dict[int, str] = {}  # rank -> why
        self._told: dict[int, dict[int, Completion]] = {}  # generation -> rank -> its report

    @property
    def num_open(self) -> int:
        """Transfers that some ranks have told of and others not."""
        return len(self._told)

    def take(self, rank: int, completions: Sequence[Completion]) -> list[Completion]:
        """One rank's reports; the transfers that have ended with them."""
        assert 0 <= rank < self._num_ranks
        if rank in self._lost:
            return []
        for completion in completions:
            self._told.setdefault(completion.generation, {}).setdefault(rank, completion)
        return self._ended([completion.generation for completion in completions])

    def lose(self, rank: int, why: str) -> list[Completion]:
        """A rank has died: it moves nothing any more, and whatever it has not told of has failed there, in what is to come too."""
        assert 0 <= rank < self._num_ranks
        self._lost.setdefault(rank, why)
        return self._ended(list(self._told))

    def _ended(self, generations: Sequence[int]) -> list[Completion]:
        ended = []
        for generation in generations:
            told = self._told.get(generation)
            if told is not None and all(rank in told or rank in self._lost for rank in range(self._num_ranks)):
                del self._told[generation]
                ended.append(self._join(generation, told))
        return ended

    def _join(self, generation: int, told: dict[int, Completion]) -> Completion:
        missing = {rank: why for rank, why in self._lost.items() if rank not in told}
        # Reports of unequal lengths agree on the spans that all of them have.
        arrived = tuple(all(parts) and not missing for parts in zip_longest(*(report.arrived for report in told.values()), fillvalue=False))
        errors = {rank: report.error for rank, report in told.items() if report.error is not None} | missing
        error = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(errors.items())) or None
        if error is None and not all(arrived):
            error = "a part did not arrive on every rank"
        seconds = max(report.seconds for report in told.values())
        return Completion(generation, arrived, seconds, sum(report.num_bytes for report in told.values()), error)
