"""Prefix reuse on a GPU, with the demo model: warm, resumed, evicted, in a crowd and from poisoned pages equals cold and alone, in every KV format.

As in tests/engine/test_prefix_equalities.py, the prompts are such that no choice of the oracle hangs on a rounding: here problems that the demo model answers
with a clear margin at every token.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll.models
from atoll import LLM, RequestOutput, SamplingParams
from atoll.models import LoadedModel, load_model
from tests.engine.tiny import check_nothing_is_held

pytestmark = pytest.mark.gpu

FORMATS = ["bf16", "fp8_tensor", "fp8_token"]
NUM_PROBLEMS = 16
MIN_MARGIN = 0.2  # natural log; far above what another cut of a prompt moves a logit in bf16
GREEDY = SamplingParams(temperature=0, max_tokens=160, logprobs=2, stop="\n\n")
PROBLEMS = Path(atoll.models.__file__).parent / "demo" / "problems.jsonl"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("demo", device="cuda", dtype=torch.bfloat16)


def make_llm(loaded: LoadedModel, kv_format: str, **options: Any) -> LLM:
    return LLM.from_loaded(loaded, **{"kv_format": kv_format, "num_pages": 4000, "max_model_len": 1024, "max_num_seqs": 16, "kv_fill": "nan"} | options)


def five_shots(loaded: LoadedModel) -> list[list[int]]:
    """Prompts that share five worked problems, and some of them more."""
    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()[:400]]
    shots = "".join(f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in problems[:5])
    return [loaded.tokenizer.encode(f"{shots}Question: {p['question']}\nAnswer:") for p in problems[5:]]


@pytest.fixture(scope="module", params=FORMATS)
def cold(request: pytest.FixtureRequest, loaded: LoadedModel) -> tuple[str, list[list[int]], list[list[int]]]:
    """Each prompt alone, in a pool of zeros, without prefix caching."""
    llm = make_llm(loaded, request.param, kv_fill="zero", prefix_caching=False, max_num_seqs=1)
    work, wanted = [], []
    for prompt in five_shots(loaded):
        output = llm.generate([prompt], GREEDY)[0]
        if min(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs or ()) > MIN_MARGIN:
            work.append(prompt)
            wanted.append(output.token_ids)
        if len(work) == NUM_PROBLEMS:
            return request.param, work, wanted
    raise AssertionError(f"only {len(work)} problems have a clear margin")


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_warm_equals_cold(loaded: LoadedModel, cold: tuple[str, list[list[int]], list[list[int]]]) -> None:
    kv_format, work, wanted = cold
    llm = make_llm(loaded, kv_format)
    first, again = llm.generate(work, GREEDY), llm.generate(work, GREEDY)
    assert tokens(first) == wanted
    assert tokens(again) == wanted
    assert all(len(output.prompt_token_ids) - output.num_cached_tokens <= 64 for output in again)
    check_nothing_is_held(llm)


def test_a_pool_that_evicts_and_preempts_equals_a_large_one(loaded: LoadedModel, cold: tuple[str, list[list[int]], list[list[int]]]) -> None:
    kv_format, work, wanted = cold
    llm = make_llm(loaded, kv_format, num_pages=220)
    outputs = [output for _ in range(3) for output in llm.generate(work, GREEDY)]
    assert tokens(outputs) == wanted * 3
    stats = llm.engine.prefix_stats
    assert stats.num_hits > 0
    assert stats.num_evicted_checkpoints > 0
    llm.engine.check()
    check_nothing_is_held(llm)


def test_resumed_equals_never_preempted(loaded: LoadedModel, cold: tuple[str, list[list[int]], list[list[int]]]) -> None:
    kv_format, work, wanted = cold
    llm = make_llm(loaded, kv_format, max_num_batched_tokens=256)
    engine, outputs = llm.engine, dict[int, RequestOutput]()
    for index, prompt in enumerate(work):
        engine.add(prompt, GREEDY, index=index)
    while engine.has_work:
        outputs |= {piece.index: piece.output for piece in engine.step() if piece.output}
        if engine.num_steps % 7 == 0 and engine.scheduler.running:
            engine.scheduler.preempt_latest()
            engine.check()
    assert [outputs[index].token_ids for index in range(len(work))] == wanted
    assert sum(output.num_preemptions for output in outputs.values()) > 5
    assert engine.prefix_stats.num_resumed > 0
    check_nothing_is_held(llm)


def test_aborts_at_every_step_disturb_nobody(loaded: LoadedModel, cold: tuple[str, list[list[int]], list[list[int]]]) -> None:
    kv_format, work, wanted = cold
    llm = make_llm(loaded, kv_format, num_pages=700, max_num_batched_tokens=256)
    for count in range(1, 24):
        ids = [llm.engine.add(prompt, replace(GREEDY, max_tokens=12)) for prompt in work[:6]]
        for _ in range(count):
            llm.engine.step()
        llm.engine.abort(ids[count % len(ids)])
        llm.engine.step()
        llm.engine.abort_all()
        llm.engine.check()
    assert tokens(llm.generate(work, GREEDY)) == wanted
    check_nothing_is_held(llm)


def test_control_a_restore_that_does_nothing_shows(
    loaded: LoadedModel, cold: tuple[str, list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_format, work, wanted = cold
    llm = make_llm(loaded, kv_format)
    assert tokens(llm.generate(work, GREEDY)) == wanted
    monkeypatch.setattr("atoll.engine.runner.restore_states", lambda slots, pool, copies: None)
    assert tokens(llm.generate(work, GREEDY)) != wanted
