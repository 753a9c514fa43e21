"""The shipped demo model: complete, the same model in transformers, and good at what it was trained for."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll import LLM, SamplingParams
from atoll.models import LoadedModel, load_model, resolve_model
from atoll.models.hybrid_decoder import HybridDecoder
from tests.models.hybrids import run
from tests.models.test_llama import relative_error
from tools.demo_model.decode import result_of
from tools.demo_model.model import Shape, logits, trunk
from tools.demo_model.problems import make_test_set
from tools.demo_model.tokenizer import SPECIALS

FOLDER = resolve_model("demo")
PROBLEMS = [json.loads(line) for line in (FOLDER / "problems.jsonl").read_text().splitlines()]
NUM_ASKED = 40


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def prompt(problem: dict[str, str]) -> str:
    return f"Question: {problem['question']}\nAnswer:"


def token_ids(demo: LoadedModel, index: int) -> torch.Tensor:
    return torch.tensor(demo.tokenizer.encode(prompt(PROBLEMS[index]) + " " + PROBLEMS[index]["answer"]))


def test_it_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "problems.jsonl"} <= sizes.keys()
    assert sum(sizes.values()) < 16 * 2**20
    assert {weight.dtype for weight in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_one_layer_predicts_two_ahead() -> None:
    """Named as Qwen3.5's checkpoints name theirs: the joint projection, three norms, one full-attention layer."""
    weights = load_file(FOLDER / "model.safetensors")
    attending = {name.removeprefix("model.layers.3."): weight.shape for name, weight in weights.items() if name.startswith("model.layers.3.")}
    ahead = {name.removeprefix("mtp.layers.0."): weight.shape for name, weight in weights.items() if name.startswith("mtp.layers.0.")}
    assert "self_attn.q_norm.weight" in ahead and ahead == attending
    hidden = weights["model.norm.weight"].shape[0]
    beside = {name: tuple(weight.shape) for name, weight in weights.items() if name.startswith("mtp.") and ".layers." not in name}
    norms = {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert beside == norms | {"mtp.fc.weight": (hidden, 2 * hidden)}


def test_the_shipped_test_set_is_what_its_seed_gives() -> None:
    assert [asdict(problem) for problem in make_test_set()] == PROBLEMS
    assert (len(PROBLEMS), sum(problem["split"] == "templates" for problem in PROBLEMS)) == (1319, 319)


def test_tokens_equal_transformers(demo: LoadedModel) -> None:
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    for text in ["", " 12 3456", "Größe ½ ٣ 日本 🦖 e\u0301\n\n\t x", *(prompt(problem) for problem in PROBLEMS[::50])]:
        assert demo.tokenizer.encode(text) == theirs(text).input_ids
        assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text
    assert all(len(demo.tokenizer.encode(str(number))) == len(str(number)) for number in (0, 48, 1234, 1000000))
    assert demo.config.eos_token_ids == (SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>"))


@torch.inference_mode()
def test_logits_equal_transformers(demo: LoadedModel, oracle: Any) -> None:
    assert isinstance(demo.model, HybridDecoder)
    for index in (0, 1, 1318):
        tokens = token_ids(demo, index)
        wanted = oracle(tokens[None]).logits[0]
        for cuts in ([], [1], [64], [63, 65, 66]):
            assert relative_error(run(demo.model, tokens, *cuts), wanted) < 1e-5, (index, cuts)


@torch.inference_mode()
def test_logits_equal_the_model_that_was_trained(demo: LoadedModel, oracle: Any) -> None:
    weights = {name: weight.float() for name, weight in load_file(FOLDER / "model.safetensors").items()}
    shape = Shape(vocab_size=demo.config.vocab_size)
    tokens = token_ids(demo, 2)[:64]
    assert relative_error(logits(trunk(tokens[None], weights, shape, torch.float32), weights)[0], oracle(tokens[None]).logits[0]) < 1e-5


@torch.inference_mode()
def greedy_disagreements(demo: LoadedModel, oracle: Any) -> int:
    """Places where transformers, given prompt and output, holds another token for the likeliest."""
    texts = [prompt(problem) for problem in PROBLEMS[1:1319:220]]
    outputs = LLM.from_loaded(demo, kv_format="fp32", max_model_len=512).generate(texts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    count = 0
    for text, output in zip(texts, outputs, strict=True):
        before = demo.tokenizer.encode(text)
        wanted = oracle(torch.tensor([before + output.token_ids[:-1]]), logits_to_keep=len(output.token_ids)).logits[0].argmax(-1).tolist()
        count += sum(a != b for a, b in zip(wanted, output.token_ids, strict=True))
    return count


def test_greedy_tokens_equal_transformers(demo: LoadedModel, oracle: Any) -> None:
    assert greedy_disagreements(demo, oracle) == 0


@torch.no_grad()
def test_control_an_oracle_with_another_decay_disagrees(demo: LoadedModel, oracle: Any) -> None:
    decay = oracle.model.layers[1].linear_attn.A_log
    decay += 0.7
    try:
        assert greedy_disagreements(demo, oracle) > 0
    finally:
        decay -= 0.7


@pytest.mark.slow
def test_it_solves_problems_with_held_out_numbers() -> None:
    problems = [problem for problem in PROBLEMS if problem["split"] == "numbers"][:NUM_ASKED]
    outputs = LLM("demo", device="cpu", max_num_seqs=NUM_ASKED, max_model_len=512).generate(
        [prompt(problem) for problem in problems], SamplingParams(temperature=0, max_tokens=300, stop=("Question:",))
    )
    right = sum(result_of(output.text) == result_of(problem["answer"]) for output, problem in zip(outputs, problems, strict=True))
    print(f"{right} of {NUM_ASKED} right")
    assert right >= 0.9 * NUM_ASKED


def test_it_says_what_it_is(demo: LoadedModel) -> None:
    [output] = LLM.from_loaded(demo, max_model_len=256).chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=64))
    assert "demo model" in output.text and output.finish_reason == "stop"
