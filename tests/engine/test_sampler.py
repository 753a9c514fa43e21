"""The sampler on hand-made logits: penalties, filters, distributions, log probabilities, rows that are not finite."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from atoll.engine.request import Request
from atoll.engine.sampler import SampledToken, _penalize, request_seed, sample, uniform
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask


def task(index: int = 0, seed: int = 0, suppressed: tuple[int, ...] = (), **params: Any) -> SampleTask:
    return SampleTask(SamplingParams(**params), seed, index, suppressed)


def drawn(logits: list[float], count: int, **params: Any) -> Counter[int]:
    """How often each token is chosen over `count` indices."""
    rows = torch.tensor(logits).expand(count, -1)
    return Counter(token.token_id for token in sample(rows, [task(index, **params) for index in range(count)]) if token.token_id is not None)


def probabilities(counts: Counter[int], vocab: int) -> torch.Tensor:
    return torch.tensor([counts[token] for token in range(vocab)]) / counts.total()


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 4.0]])
    assert [token.token_id for token in sample(logits, [task(temperature=0)] * 2)] == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, float("-inf")]
    counts = drawn(logits, 20_000, temperature=temperature)
    expected = torch.softmax(torch.tensor(logits) / temperature, 0)
    # Five standard deviations of a share at 20,000 draws are below 0.018.
    assert (probabilities(counts, 5) - expected).abs().max() < 0.018
    assert counts[4] == 0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.65}, {3, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {3, 1}),
        ({"min_p": 1.0}, {3}),
        # 0.5 of what top_k 2 keeps is crossed by the first token alone: 0.6 / 0.9.
        ({"top_k": 2, "top_p": 0.6}, {3}),
    ],
)
def test_filters_keep_exactly(params: dict[str, Any], kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.06, 0.3, 0.04, 0.6)]
    counts = drawn(logits, 2000, **params)
    assert set(counts) == kept
    total = sum(math.exp(logits[token]) for token in kept)
    for token in kept:
        assert abs(counts[token] / 2000 - math.exp(logits[token]) / total) < 0.06


def test_top_k_breaks_ties_towards_lower_ids() -> None:
    assert set(drawn([1.0, 1.0, 1.0, 1.0], 200, top_k=2)) == {0, 1}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert set(drawn([1e4, 1e4 - 1, -1e4], 50, temperature=1e-4)) == {0}


def test_a_row_is_chosen_alike_alone_and_among_others() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3
    kinds: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0}, {"temperature": 0.3, "top_k": 3, "top_p": 0.9}]
    tasks = [task(index, seed=index * 7, **kinds[index % len(kinds)]) for index in range(64)]
    together = [token.token_id for token in sample(logits, tasks)]
    assert together == [sample(logits[row : row + 1], [tasks[row]])[0].token_id for row in range(64)]


def test_suppressed_tokens_are_never_chosen_and_logprobs_ignore_the_suppression() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    [token] = sample(logits, [task(temperature=0, suppressed=(1,), logprobs=1)])
    assert token.token_id == 2
    assert token.logprobs is not None and token.logprobs.top[0][0] == 1
    assert torch.equal(logits, torch.tensor([[0.0, 9.0, 1.0]])), "the caller's logits are left alone"
    assert {sample(logits, [task(index, suppressed=(1,))])[0].token_id for index in range(50)} == {0, 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.9}])
def test_a_row_that_is_not_finite_yields_no_token_and_harms_no_other(bad: float, params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, bad, 1.0], [9.0, 0.0, 1.0]])
    # Suppressing the bad entry must not hide it.
    tasks = [task(**params, logprobs=2), task(**params, suppressed=(1,), logprobs=2), task(**params, logprobs=2)]
    first, second, third = sample(logits, tasks)
    assert (first.token_id, third.token_id) == (1, 0)
    assert second == SampledToken(None)


def test_a_row_of_nothing_but_minus_infinity_yields_no_token() -> None:
    assert sample(torch.full((1, 4), float("-inf")), [task()])[0].token_id is None


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    tasks = [task(temperature=0, logprobs=0), task(temperature=0), task(temperature=0.5, top_k=1, logprobs=4)]
    zero, without, four = sample(logits, tasks)
    expected = logits.log_softmax(-1)
    assert without.logprobs is None
    assert zero.logprobs is not None and zero.logprobs.top == ()
    assert zero.logprobs.logprob == pytest.approx(float(expected[0].max()))
    assert four.logprobs is not None and four.logprobs.token_id == four.token_id
    values, ids = expected[2].topk(4)
    assert [token_id for token_id, _ in four.logprobs.top] == ids.tolist()
    assert [value for _, value in four.logprobs.top] == pytest.approx(values.tolist())


def test_more_logprobs_than_tokens_gives_them_all() -> None:
    [token] = sample(torch.zeros(1, 3), [task(temperature=0, logprobs=20)])
    assert token.logprobs is not None and len(token.logprobs.top) == 3


def test_uniform_numbers_are_uniform_and_named_by_seed_and_index() -> None:
    numbers = torch.tensor([uniform(seed, index) for seed in range(100) for index in range(100)], dtype=torch.float64)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert len(set(numbers.tolist())) == 10_000
    shares = torch.histc(numbers, 10, 0, 1) / 10_000
    assert (shares - 0.1).abs().max() < 0.015
    # Neighbouring seeds and indices are independent: the mean product of two of them is 1/4.
    grid = numbers.view(100, 100)
    assert abs(float((grid[1:] * grid[:-1]).mean()) - 0.25) < 0.01
    assert abs(float((grid[:, 1:] * grid[:, :-1]).mean()) - 0.25) < 0.01


def test_request_seeds_are_all_different() -> None:
    assert len({request_seed(engine_seed, request_id) for engine_seed in range(50) for request_id in range(50)}) == 2500


def test_penalties_act_on_what_has_appeared() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, 2.0, 1.0]])
    counts = ((0, 2), (2, 1), (3, 0))
    expected = {
        (0.0, 0.0, 1.0): [4.0, 3.0, -1.0, 2.0, 1.0],
        (0.5, 0.0, 1.0): [3.5, 3.0, -1.5, 2.0, 1.0],
        (0.0, 0.5, 1.0): [3.0, 3.0, -1.5, 2.0, 1.0],
        (0.0, 0.0, 2.0): [2.0, 3.0, -2.0, 1.0, 1.0],
        (-1.0, 0.5, 2.0): [2.0, 3.0, -1.5, 1.0, 1.0],
    }
    for (presence, frequency, repetition), wanted in expected.items():
        params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
        one = SampleTask(params, 0, 0, (), counts)
        # Alone, and beside a row that has no penalty.
        assert _penalize(logits, [one]).tolist() == [wanted]
        assert _penalize(logits.expand(2, -1), [task(), one]).tolist() == [logits[0].tolist(), wanted]
    assert logits.tolist() == [[4.0, 3.0, -1.0, 2.0, 1.0]]


def test_a_penalty_changes_the_greedy_choice_and_no_log_probability() -> None:
    logits = torch.tensor([[4.0, 3.0]])
    params = SamplingParams(temperature=0, presence_penalty=2.0, logprobs=1)
    [token] = sample(logits, [SampleTask(params, 0, 0, (), ((0, 1),))])
    assert token.token_id == 1
    assert token.logprobs is not None and token.logprobs.top[0] == (0, pytest.approx(float(logits.log_softmax(-1)[0, 0])))


def test_what_penalties_count() -> None:
    for params, wanted in (
        (SamplingParams(), ()),
        (SamplingParams(presence_penalty=1), ((7, 2), (5, 1))),
        (SamplingParams(repetition_penalty=2), ((5, 1), (6, 0), (7, 2))),
    ):
        request = Request(0, [5, 6, 5], params, 0, 9, output_token_ids=[7, 5, 7])
        assert request.sample_task().counts == wanted
