"""Real weights: greedy tokens of the engine are those of transformers on the same GGUF file, batched and alone, chunked and whole.

transformers is asked for every prompt in one pass over prompt and output: where the most likely token after each prefix is the one that the engine chose,
its own greedy decoding would have gone the same way. Its cache takes the engine's rounding: with a bf16 cache on one side only, near-ties may tip.
"""

import functools
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
import transformers

from atoll import LLM, SamplingParams
from atoll.models import LoadedModel, load_model, resolve_model
from tests.models.test_llama import expected, relative_error, run

pytestmark = pytest.mark.slow

NUM_TOKENS = 16

PROMPTS = [
    "The capital of France is",
    "Hello",
    "x",
    "1 2 3 4 5 6",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "import numpy as np\n\n",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Bonjour, je m'appelle",
    "In 1969, Neil Armstrong",
    "SELECT name, age FROM users WHERE",
    "A recipe for pancakes: take two eggs, a cup of flour and",
    "E = mc^2 means that",
    "List of planets: Mercury, Venus, Earth,",
    "The quick brown fox jumps over the lazy dog. " * 8,
    " ".join(str(number) for number in range(60)),
]


_update = transformers.DynamicCache.update


def _update_rounded(self: transformers.DynamicCache, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keys and values as a paged pool of bf16 rows would give them back."""
    return _update(self, key_states.bfloat16().float(), value_states.bfloat16().float(), *args, **kwargs)


UPDATES = {"fp32": _update, "bf16": _update_rounded}


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    path = resolve_model("smollm2")
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the whole file twice, and makes the map of names anew for each module: more than half of its time.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = transformers.LlamaForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    yield model
    transformers.utils.logging.enable_progress_bar()


def test_logits_equal_transformers(smollm2: LoadedModel, oracle: Any) -> None:
    """Here, and not beside the tests of GGUF, because transformers reads the file for longer than it takes to compare."""
    for prompt in PROMPTS:
        tokens = torch.tensor(smollm2.tokenizer.encode(prompt))
        logits, wanted = run(smollm2, tokens), expected(oracle, tokens)
        assert relative_error(logits, wanted) < 1e-4, prompt
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1)), prompt


def make_llm(loaded: LoadedModel, **options: Any) -> LLM:
    return LLM.from_loaded(loaded, **{"max_model_len": 512, "max_num_seqs": len(PROMPTS), **options})


def greedy(llm: LLM, prompts: list[str], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


@torch.inference_mode()
def disagreements(oracle: Any, prompt: list[int], tokens: list[int], kv_format: str) -> list[tuple[int, float]]:
    """Where transformers prefers another token than the engine's, and by how much (logits)."""
    with pytest.MonkeyPatch.context() as patch:
        # Not passed as an argument: its name differs between the versions of transformers.
        patch.setattr(transformers.DynamicCache, "update", UPDATES[kv_format])
        logits = oracle(torch.tensor([prompt + tokens[:-1]]), use_cache=True, logits_to_keep=len(tokens)).logits[0]
    lost = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return [(index, float(by)) for index, by in enumerate(lost) if by > 0]


def all_disagreements(oracle: Any, loaded: LoadedModel, tokens: list[list[int]], kv_format: str) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """The prompts at which there are any, and where."""
    for prompt, own in zip(PROMPTS, tokens, strict=True):
        if places := disagreements(oracle, loaded.tokenizer.encode(prompt), own, kv_format):
            yield prompt, places


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def batched(request: pytest.FixtureRequest, smollm2: LoadedModel) -> tuple[str, list[list[int]]]:
    """A cache format, and every prompt's tokens, all run together and prefilled whole."""
    return request.param, greedy(make_llm(smollm2, kv_format=request.param), PROMPTS)


def test_batched_equals_transformers(batched: tuple[str, list[list[int]]], smollm2: LoadedModel, oracle: Any) -> None:
    kv_format, tokens = batched
    assert list(all_disagreements(oracle, smollm2, tokens, kv_format)) == []


def test_alone_equals_batched(batched: tuple[str, list[list[int]]], smollm2: LoadedModel) -> None:
    kv_format, tokens = batched
    llm = make_llm(smollm2, kv_format=kv_format)
    # Half of the tokens: a step costs the same for one prompt as for all of them.
    half = NUM_TOKENS // 2
    assert [greedy(llm, [prompt], half)[0] for prompt in PROMPTS] == [own[:half] for own in tokens]


def test_chunked_on_a_poisoned_pool_equals_batched(batched: tuple[str, list[list[int]]], smollm2: LoadedModel) -> None:
    kv_format, tokens = batched
    llm = make_llm(smollm2, kv_format=kv_format, kv_fill="nan", max_num_seqs=6, max_num_batched_tokens=69)
    assert greedy(llm, PROMPTS) == tokens


@pytest.mark.parametrize("batched", ["bf16"], indirect=True)
def test_a_bf16_cache_tips_only_near_ties(batched: tuple[str, list[list[int]]], smollm2: LoadedModel, oracle: Any) -> None:
    """Against transformers without any rounding; an fp32 cache tips nothing, as above."""
    kv_format, tokens = batched
    places = [place for _, found in all_disagreements(oracle, smollm2, tokens, "fp32") for place in found]
    worst = max((by for _, by in places), default=0.0)
    print(f"{kv_format}: transformers prefers another token in {len(places)} of {NUM_TOKENS * len(PROMPTS)} places, by {worst:.4f} logits at most")
    assert len(places) <= 0.02 * NUM_TOKENS * len(PROMPTS)
    assert all(by < 0.05 for _, by in places)


@pytest.mark.parametrize("kv_format", ["fp8_token", "fp8_tensor"])
def test_fp8_caches_still_speak(kv_format: str, smollm2: LoadedModel, oracle: Any) -> None:
    tokens = greedy(make_llm(smollm2, kv_format=kv_format), PROMPTS)
    share = sum(len(places) for _, places in all_disagreements(oracle, smollm2, tokens, "fp32")) / (NUM_TOKENS * len(PROMPTS))
    print(f"{kv_format}: transformers prefers another token in {share:.1%} of places")
    assert share < 0.15
    assert " Paris" in smollm2.tokenizer.decode(tokens[0])


def test_chat_speaks(smollm2: LoadedModel) -> None:
    [output] = make_llm(smollm2).chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in output.text
    assert output.finish_reason == "stop" and output.token_ids[-1] in smollm2.config.eos_token_ids


def test_control_an_oracle_with_other_weights_disagrees(batched: tuple[str, list[list[int]]], smollm2: LoadedModel, oracle: Any) -> None:
    """One norm weight changed by a tenth is seen, so agreement is not cheap."""
    kv_format, tokens = batched
    weight = oracle.model.layers[12].input_layernorm.weight
    with torch.no_grad():
        weight *= 1.1
    try:
        assert any(all_disagreements(oracle, smollm2, tokens, kv_format))
    finally:
        with torch.no_grad():
            weight /= 1.1
