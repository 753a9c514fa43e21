"""Qwen3 end to end: greedy tokens of the engine are those of transformers' generate: alone, in a crowd, with prompts in chunks, and after preemption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from tests.engine.tiny import prompts
from tests.models.tiny import make_folder

NUM_TOKENS = 24
PROMPTS = prompts(6, longest=200)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_folder(folder, "qwen3", head_dim=16, eos_token_id=None)


def generated(oracle: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", **{"kv_format": "fp32", "num_pages": 64, "max_num_seqs": 4, "max_model_len": 256} | options)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 67}, {"max_num_seqs": 1}], ids=["whole", "chunked", "alone"])
def test_greedy_tokens_equal_transformers(options: dict[str, Any], folder: Path, oracle: Any) -> None:
    wanted = [generated(oracle, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)
    assert [output.token_ids for output in make(folder, **options).generate(PROMPTS, GREEDY)] == wanted


def test_preempted_requests_equal_transformers(folder: Path, oracle: Any) -> None:
    short = prompts(6, longest=40)
    outputs = make(folder, page_size=1, num_pages=90, max_model_len=80).generate(short, GREEDY)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == [generated(oracle, prompt) for prompt in short]
