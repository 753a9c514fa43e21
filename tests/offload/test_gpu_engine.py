"""Engines on a GPU whose prefixes come back from pinned host memory: the bits of resident ones, beside graphs, with NaN wherever nothing was loaded."""

import random

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.engine.output import RequestOutput
from atoll.models import LoadedModel, load_model
from atoll.models.llama import LlamaModel
from tests.engine.tiny import CONFIG, ByteTokenizer, RandomWeights, TinyLoaded
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "qwen3_5_moe"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyLoaded | LoadedModel:
    if request.param == "llama":
        return TinyLoaded(LlamaModel(CONFIG, RandomWeights(CONFIG), torch.device(DEVICE), torch.bfloat16), CONFIG, ByteTokenizer())
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, **CASES[request.param] | {"eos_token_id": None})
    return load_model(str(folder), device=DEVICE, dtype=torch.bfloat16)


def make_llm(loaded: TinyLoaded | LoadedModel, kv_format: str = "bf16") -> LLM:
    options = {"kv_format": kv_format, "kv_fill": "nan", "max_num_seqs": 8, "max_model_len": 256, "offload": "host:64MiB"}
    return LLM.from_loaded(loaded, **options)  # type: ignore[arg-type]


def make_prompts(loaded: TinyLoaded | LoadedModel, count: int) -> list[list[int]]:
    rand = random.Random(0)
    return [[rand.randrange(loaded.config.vocab_size) for _ in range(178 + i)] for i in range(count)]


def bits(output: RequestOutput) -> tuple[list[int], list[float]]:
    return output.token_ids, [entry.logprob for entry in output.logprobs or []]


def forget_in_pool(llm: LLM) -> None:
    """Only the tiers have the prefixes now, and nothing of them is left in the pages."""
    llm.engine.scheduler.cache.reset()
    llm.engine.pool.poison(range(1, llm.engine.pool.num_pages), "nan")


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_a_fetched_prefix_gives_the_bits_of_a_resident_one(loaded: TinyLoaded | LoadedModel, kv_format: str) -> None:
    # No page is filled while it decodes: one that a run in the pool filled before would take its place, with the bits of another prefill.
    [prompt] = make_prompts(loaded, 1)
    with make_llm(loaded, kv_format) as llm:
        [computed] = llm.generate([prompt], GREEDY)
        [resident] = llm.generate([prompt], GREEDY)
        forget_in_pool(llm)
        [fetched] = llm.generate([prompt], GREEDY)
        assert llm.engine.runner.captured_sizes
        assert (computed.num_cached_tokens, resident.num_fetched_tokens) == (0, 0)
        assert fetched.num_fetched_tokens == fetched.num_cached_tokens == resident.num_cached_tokens > 0
        assert bits(fetched) == bits(resident)
        llm.engine.check()


def test_many_fetch_at_once_and_decode_beside_it(loaded: TinyLoaded | LoadedModel) -> None:
    prompts = make_prompts(loaded, 24)
    with make_llm(loaded) as llm:
        llm.generate(prompts, GREEDY)
        forget_in_pool(llm)
        outputs = llm.generate(prompts, GREEDY)
        assert [output.finish_reason for output in outputs] == ["length"] * len(prompts)
        assert sum(output.num_fetched_tokens > 0 for output in outputs) >= len(prompts) // 2
        stats = llm.engine.offload_stats
        assert stats is not None and (stats.num_load_failures, stats.num_store_failures) == (0, 0)
        assert stats.loaded_bytes > 0 and stats.loaded_seconds > 0
        llm.engine.check()
