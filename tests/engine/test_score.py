"""A prompt's own log probabilities: those that cut prompts give one by one, whole or in chunks, in a crowd, with prefixes cached and after preemption."""

from typing import Any

import pytest
import torch

from atoll import LLM, RequestOutput, SamplingParams
from atoll.engine import score as score_module
from atoll.engine.request import Request
from atoll.engine.step import ScoreTask
from tests.engine.tiny import make_llm, prompts

PROMPTS = prompts(5, longest=90)


Wanted = list[list[dict[int, float]]]


@pytest.fixture(scope="module")
def one_by_one() -> Wanted:
    """The 20 most likely tokens after each beginning of each prompt."""
    llm = make_llm(prefix_caching=False)
    found: Wanted = []
    for prompt in PROMPTS:
        cut = llm.generate([prompt[:length] for length in range(1, len(prompt))], SamplingParams(temperature=0, max_tokens=1, logprobs=20))
        found.append([dict(output.logprobs[0].top) for output in cut if output.logprobs is not None])
    return found


def run(llm: LLM, **options: Any) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=options.pop("max_tokens", 1), ignore_eos=True, prompt_logprobs=3))


def check(outputs: list[RequestOutput], wanted: Wanted) -> None:
    for prompt, output, tops in zip(PROMPTS, outputs, wanted, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        for token_id, entry, top in zip(prompt[1:], entries[1:], tops, strict=True):
            assert entry is not None and entry.token_id == token_id
            assert dict(entry.top) == pytest.approx(dict([*top.items()][:3]), abs=1e-4)
            assert entry.logprob == pytest.approx(top[token_id], abs=1e-4) if token_id in top else entry.logprob < min(top.values())


def test_they_are_those_of_cut_prompts(one_by_one: Wanted) -> None:
    check(run(make_llm()), one_by_one)


def test_chunks_and_few_rows_at_once_change_nothing(one_by_one: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "MAX_ROWS", 7)
    check(run(make_llm(max_num_batched_tokens=71)), one_by_one)


def test_cached_prefixes_are_computed_again(one_by_one: Wanted) -> None:
    llm = make_llm(page_size=1)
    for _ in range(2):
        outputs = run(llm)
        check(outputs, one_by_one)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert [dict(output.prefix_misses) for output in outputs] == [{"scored": len(prompt)} for prompt in PROMPTS]
    [plain] = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1))
    assert plain.num_cached_tokens > 0 and plain.prompt_logprobs is None


def test_a_preemption_scores_again_and_tells_once(one_by_one: Wanted) -> None:
    outputs = run(make_llm(num_pages=18, max_model_len=200), max_tokens=60)
    assert sum(output.num_preemptions for output in outputs) > 0
    check(outputs, one_by_one)


def test_pieces_bring_them_once() -> None:
    pieces = list(make_llm().generate_stream(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1, logprobs=2)))
    for index in (0, 1):
        own = [piece for piece in pieces if piece.index == index]
        assert [piece.prompt_logprobs is not None for piece in own] == [True, False, False]
        assert own[-1].output is not None and own[0].prompt_logprobs == own[-1].output.prompt_logprobs
        assert [entry for piece in own for entry in piece.logprobs] == own[-1].output.logprobs


def test_control_targets_shifted_by_one(one_by_one: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Request.score_task

    def shifted(request: Request, start: int, count: int) -> ScoreTask | None:
        task = right(request, start, count)
        return ScoreTask(request.prompt_token_ids[start : start + len(task.targets)], task.num_top) if task is not None else None

    monkeypatch.setattr(Request, "score_task", shifted)
    with pytest.raises(AssertionError):
        check(run(make_llm()), one_by_one)


@pytest.mark.gpu
def test_they_are_those_of_cut_prompts_on_a_gpu(device: torch.device) -> None:
    """Of the demo model in bf16, whose single-token chunks are replayed from a graph."""
    llm = LLM("demo", device=str(device), page_size=16)
    [output] = llm.generate("Ruth has 48 marbles.", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    ids = output.prompt_token_ids
    cut = llm.generate([ids[:length] for length in range(1, len(ids))], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    for entry, one in zip(output.prompt_logprobs[1:], cut, strict=True):
        assert entry is not None and one.logprobs is not None
        assert entry.top[0][1] == pytest.approx(one.logprobs[0].top[0][1], abs=0.1)
