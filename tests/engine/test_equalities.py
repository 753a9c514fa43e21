"""Greedy decoding gives the same tokens however a request is batched, cut, preempted or surrounded by garbage; and seeds do the same for sampling."""

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.config import SchedulerConfig
from atoll.engine.batch import BatchBuilder
from atoll.engine.request import Request
from atoll.engine.reuse import PrefixReuse
from atoll.engine.scheduler import Scheduler
from atoll.kv import FILLS
from atoll.kv.prefix_match import Match
from tests.engine.tiny import make_llm, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def generate(llm: LLM, token_prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(token_prompts, params)
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each of the prompts run by itself, on a pool of zeros."""
    llm = make_llm()
    return [generate(llm, [prompt])[0] for prompt in prompts(12)]


def test_the_oracle_is_not_trivial(alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert all(len(set(tokens)) > 4 for tokens in alone)


def test_in_a_crowd_equals_alone(alone: list[list[int]]) -> None:
    assert generate(make_llm(max_num_seqs=12), prompts(12)) == alone


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_every_page_size_gives_the_same_tokens(alone: list[list[int]], page_size: int) -> None:
    assert generate(make_llm(page_size=page_size), prompts(12)) == alone


@pytest.mark.parametrize("fill", FILLS)
def test_a_poisoned_pool_equals_a_zeroed_one(alone: list[list[int]], fill: str) -> None:
    assert generate(make_llm(kv_fill=fill), prompts(12)) == alone


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_tensor", "fp8_token"])
def test_a_poisoned_pool_equals_a_zeroed_one_in_every_format(kv_format: str) -> None:
    clean, poisoned = (generate(make_llm(kv_format=kv_format, kv_fill=fill), prompts(6)) for fill in ("zero", "nan"))
    assert clean == poisoned


def test_reused_pages_equal_fresh_ones(alone: list[list[int]]) -> None:
    """What an earlier request left behind is as good as zeros."""
    llm = make_llm(num_pages=33, max_model_len=128)
    for _ in range(3):
        assert generate(llm, prompts(12)) == alone


def chunked_llm(grid: int, budget: int) -> LLM:
    llm = make_llm(max_num_seqs=1)
    config = SchedulerConfig(page_size=16, max_model_len=256, max_num_seqs=1, max_num_batched_tokens=budget, prefill_grid=grid)
    llm.engine.scheduler = Scheduler(config, llm.engine.pool.ledger)
    return llm


def test_every_split_of_a_prompt_equals_the_whole() -> None:
    prompt = prompts(2, longest=37)[1]
    [whole] = generate(make_llm(), [prompt])
    for first in range(1, len(prompt)):
        # A grid as wide as the first chunk makes the cuts first, first, ..., rest.
        assert generate(chunked_llm(first, first), [prompt]) == [whole], f"cut every {first} tokens"


def test_chunks_beside_decodes_equal_the_whole(alone: list[list[int]]) -> None:
    llm = make_llm(max_num_seqs=4, max_num_batched_tokens=67)
    pieces = list(llm.generate_stream(prompts(12), GREEDY))
    outputs = {piece.index: piece.output for piece in pieces if piece.output}
    assert [outputs[index].token_ids for index in range(12)] == alone


def test_preempted_equals_undisturbed(alone: list[list[int]]) -> None:
    # 9 pages of 16: one sequence of 114 tokens fits, two seldom do.
    llm = make_llm(num_pages=10, max_model_len=144, max_num_seqs=6)
    outputs = llm.generate(prompts(12), GREEDY)
    assert sum(output.num_preemptions for output in outputs) > 3
    assert [output.token_ids for output in outputs] == alone


SAMPLED = [
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.7, top_k=20, max_tokens=12, ignore_eos=True, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, max_tokens=12, ignore_eos=True, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, max_tokens=12, ignore_eos=True, seed=4),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True, seed=5),
]


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption() -> None:
    work, params = prompts(12), [SAMPLED[index % len(SAMPLED)] for index in range(12)]
    one = make_llm()
    apart = [one.generate([prompt], p)[0].token_ids for prompt, p in zip(work, params, strict=True)]
    crowd = [output.token_ids for output in make_llm(max_num_seqs=12).generate(work, params)]
    tight = make_llm(num_pages=10, max_model_len=144, max_num_seqs=6).generate(work, params)
    assert sum(output.num_preemptions for output in tight) > 0
    assert apart == crowd == [output.token_ids for output in tight]


def test_seeds_differ_and_repeat() -> None:
    prompt = [prompts(2)[1]] * 4
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in (7, 8, 7, 2**63 - 1)]
    first, second, again, largest = [output.token_ids for output in make_llm().generate(prompt, params)]
    assert first == again
    assert len({tuple(first), tuple(second), tuple(largest)}) == 3


def test_requests_without_a_seed_differ_and_follow_the_engine_seed() -> None:
    prompt, params = [prompts(2)[1]] * 2, SamplingParams(max_tokens=12, ignore_eos=True)
    zero, again, one = ([o.token_ids for o in make_llm(seed=seed).generate(prompt, params)] for seed in (0, 0, 1))
    assert zero == again
    assert zero[0] != zero[1] and zero != one


# Negative controls: each breaks the engine in one place, and an equality above must notice.


def test_control_a_wrong_slot_shows(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    fill = BatchBuilder._fill_tokens

    def shifted(self: BatchBuilder, ints: object, step: object) -> None:
        fill(self, ints, step)  # type: ignore[arg-type]
        ints[2, : len(step.decodes)] += 1  # type: ignore[attr-defined,index]

    monkeypatch.setattr(BatchBuilder, "_fill_tokens", shifted)
    assert [output.token_ids for output in make_llm(num_pages=64, kv_fill="random").generate(prompts(6), GREEDY)] != alone[:6]


def test_control_a_neighbours_table_row_shows(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    fill = BatchBuilder._fill_table

    def rolled(self: BatchBuilder, seq_lens: object, page_table: object, rows: list[object]) -> None:
        fill(self, seq_lens, page_table, [*rows[1:], *rows[:1]])  # type: ignore[arg-type,list-item]

    monkeypatch.setattr(BatchBuilder, "_fill_table", rolled)
    assert generate(make_llm(max_num_seqs=12), prompts(12)) != alone


def test_control_a_preemption_that_keeps_num_computed_shows(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens after a preemption would then read pages that were never written again."""
    begin = PrefixReuse.begin

    def overreaching(self: PrefixReuse, request: Request, match: Match) -> None:
        begin(self, request, match)
        if request.num_preemptions and request.num_tokens > 64:
            request.num_computed = 64

    monkeypatch.setattr(PrefixReuse, "begin", overreaching)
    llm = make_llm(num_pages=10, max_model_len=144, max_num_seqs=6, kv_fill="random", prefix_caching=False)
    assert [output.token_ids for output in llm.generate(prompts(12), GREEDY)] != alone


def test_control_a_seed_that_depends_on_the_batch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr("atoll.engine.sampler.uniform", lambda seed, index: float(torch.rand((), generator=generator)))
    params = SAMPLED[0]
    llm = make_llm()
    apart = [llm.generate([prompt], params)[0].token_ids for prompt in prompts(4)]
    assert [output.token_ids for output in llm.generate(prompts(4), params)] != apart
