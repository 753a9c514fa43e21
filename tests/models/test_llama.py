"""Llama, Mistral and SmolLM2 against transformers: the same logits from the same checkpoint."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.models import LoadedModel, load_model
from atoll.models.linear import Linear, is_packable
from tests.models.dense import DenseAttention
from tests.models.tiny import VOCAB_SIZE, make_folder

TOKENS = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1))
LLAMA3_ROPE = {"rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32},
    "sharded": {"max_shard_size": "50KB"},
    "rope_linear": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
    "rope_llama3": {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 64}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_window": {"model_type": "mistral", "sliding_window": 9},
}


def run(loaded: LoadedModel, tokens: torch.Tensor, *cuts: int) -> torch.Tensor:
    """Logits of every position; the tokens are fed in pieces that end at `cuts`."""
    attend = DenseAttention(loaded.config.window)
    bounds = [0, *cuts, len(tokens)]
    hidden = [loaded.model.forward(tokens[a:b], torch.arange(a, b), attend) for a, b in pairwise(bounds)]
    return loaded.model.logits(torch.cat(hidden))


def expected(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def relative_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    wanted = expected(oracle, TOKENS)
    assert relative_error(run(loaded, TOKENS), wanted) < 1e-5
    # In pieces, the last of them one token each, as in chunked prefill and decode.
    assert relative_error(run(loaded, TOKENS, 31, 67, 68, 69), wanted) < 1e-5


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("mistral_window", {"sliding_window": 10}),
        ("rope_linear", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ("rope_llama3", {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 128}}),
        ("gqa", {"rms_norm_eps": 1e-2}),
    ],
)
def test_a_wrong_config_shows_in_the_logits(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    edit_config(tmp_path, **change)
    assert relative_error(run(load_model(str(tmp_path), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) > 1e-3


def test_the_older_spelling_of_rope_scaling(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES["rope_llama3"])
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    edit_config(tmp_path, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert relative_error(run(load_model(str(tmp_path), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) < 1e-5


def test_bf16_is_as_good_as_transformers_bf16(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path)
    exact = expected(oracle.double(), TOKENS)
    lowprec = expected(oracle.bfloat16(), TOKENS).double()
    logits = run(load_model(str(tmp_path), dtype=torch.bfloat16), TOKENS)
    assert logits.dtype == torch.float32
    rounding = exact.abs().max() * 2**-8
    assert (logits - exact).abs().max() <= 2 * (lowprec - exact).abs().max() + rounding


def test_eos_ids_of_both_configs(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (258, 257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 100])
def test_linear_equals_the_plain_product(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 72).to(dtype), torch.randn(40, 72).to(dtype)
    product = Linear(weight)(x)
    exact = x.double() @ weight.double().T
    assert product.dtype == dtype and product.shape == (num_rows, 40)
    assert (product - exact).abs().max() <= exact.abs().max() * (2**-8 if dtype == torch.bfloat16 else 1e-6)


def test_only_the_cpu_packs() -> None:
    assert not is_packable(torch.empty(4, 4, device="meta"))
    assert not is_packable(torch.empty(4, 4, dtype=torch.float64))


@pytest.mark.gpu
def test_a_cuda_graph_captures_the_forward(tmp_path: Path, device: torch.device) -> None:
    oracle = make_folder(tmp_path).to(device)
    loaded = load_model(str(tmp_path), device=device, dtype=torch.float32)
    tokens, positions = TOKENS.to(device), torch.arange(len(TOKENS), device=device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    def step() -> torch.Tensor:
        return loaded.model.logits(loaded.model.forward(tokens, positions, attend))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    tokens.copy_(TOKENS.flip(0))
    graph.replay()
    assert torch.equal(logits, step())
    assert relative_error(logits, expected(oracle, tokens)) < 1e-4  # other kernels than on a CPU, other order of sums


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
