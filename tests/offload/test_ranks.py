"""Reports of several ranks: over ranks, one failure is everybody's miss."""

from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.offload import ranks as ranks_module
from atoll.offload.base import Completion
from atoll.offload.ranks import RankReports


def report(generation: int, *arrived: bool, seconds: float = 1.0, error: str | None = None) -> Completion:
    return Completion(generation, arrived, seconds, sum(arrived) * 100, error if error is not None or all(arrived) else "failed")


def test_a_transfer_ends_when_every_rank_has_told() -> None:
    ranks = RankReports(3)
    assert ranks.take(1, [report(7, True, True, seconds=2.0)]) == []
    assert ranks.take(0, [report(7, True, True), report(8, True)]) == []
    assert ranks.num_open == 2
    # The slowest rank's time, and all ranks' bytes.
    assert ranks.take(2, [report(7, True, True)]) == [Completion(7, (True, True), 2.0, 600, None)]
    assert ranks.num_open == 1


def test_a_rank_that_tells_twice_is_counted_once() -> None:
    ranks = RankReports(2)
    assert ranks.take(0, [report(7, True)]) == []
    assert ranks.take(0, [report(7, False)]) == []
    assert ranks.take(1, [report(7, True)]) == [Completion(7, (True,), 1.0, 200, None)]


def check_failures() -> None:
    ranks = RankReports(2)
    ranks.take(0, [report(7, True, False, True, error="torn"), report(8, False), report(9, True)])
    ended = {completion.generation: completion for completion in ranks.take(1, [report(7, False, True, True), report(8, True), report(9, True)])}
    assert ended[7].arrived == (False, False, True), "a miss on one rank"
    assert ended[7].error == "rank 0: torn; rank 1: failed"
    assert not ended[8].ok and ended[9].ok
    assert ranks.num_open == 0


def test_what_failed_on_one_rank_failed_on_all() -> None:
    check_failures()


def test_a_join_that_is_content_with_one_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "zip_longest", lambda *parts, fillvalue: [(any(column),) for column in zip_longest(*parts, fillvalue=fillvalue)])
    with pytest.raises(AssertionError, match="a miss on one rank"):
        check_failures()


def test_reports_of_unequal_length_agree_on_what_both_have() -> None:
    ranks = RankReports(2)
    ranks.take(0, [report(7, True, True)])
    assert ranks.take(1, [report(7, True)]) == [Completion(7, (True, False), 1.0, 300, "a part did not arrive on every rank")]


def test_a_lost_rank_fails_what_it_has_not_told_of() -> None:
    ranks = RankReports(3)
    ranks.take(1, [report(7, True), report(8, True)])
    ranks.take(0, [report(7, True), report(8, True)])
    ranks.take(2, [report(9, True)])
    ended = ranks.lose(2, "its process ended")
    assert [(c.generation, c.arrived, c.error) for c in ended] == [(7, (False,), "rank 2: its process ended"), (8, (False,), "rank 2: its process ended")]
    # What it had told before its end is its word; what it tells later is not.
    ranks.take(0, [report(9, True), report(10, True)])
    assert ranks.take(2, [report(10, True)]) == []
    assert [(c.generation, c.ok) for c in ranks.take(1, [report(9, True), report(10, True)])] == [(9, True), (10, False)]
    assert ranks.lose(2, "again") == [] and ranks.num_open == 0


@given(st.data())
def test_any_order_of_reports_gives_the_same_answers(data: st.DataObject) -> None:
    num_ranks, generations = data.draw(st.integers(1, 4)), range(1, data.draw(st.integers(1, 5)) + 1)
    parts = {(rank, g): data.draw(st.lists(st.booleans(), min_size=2, max_size=2)) for rank in range(num_ranks) for g in generations}
    ranks = RankReports(num_ranks)
    ended: dict[int, Completion] = {}
    for rank, generation in data.draw(st.permutations(list(parts))):
        for completion in ranks.take(rank, [report(generation, *parts[rank, generation])]):
            assert completion.generation not in ended
            ended[completion.generation] = completion
    assert ranks.num_open == 0
    for generation in generations:
        assert ended[generation].arrived == tuple(all(parts[rank, generation][i] for rank in range(num_ranks)) for i in range(2))
        assert (ended[generation].error is None) == ended[generation].ok
