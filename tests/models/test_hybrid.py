"""Qwen3-Next, Qwen3.5 and Qwen3.5 MoE against transformers: the same logits from the same checkpoint, whole and in pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.models import attention_layer, delta_layer
from atoll.models.hybrid_decoder import HybridDecoder
from atoll.models.mlp import silu_and_multiply
from atoll.models.moe import grouped_product_waits
from tests.models.dense import DenseAttention
from tests.models.hybrids import CASES, open_hybrid, run
from tests.models.plain_delta import PlainDelta
from tests.models.test_llama import TOKENS, edit_config, expected, relative_error
from tests.models.tiny import make_folder


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    model, wanted = open_hybrid(tmp_path), expected(oracle, TOKENS)
    assert relative_error(run(model, TOKENS), wanted) < 1e-5
    # In pieces: shorter than the conv, around the oracle's chunk of 64, one token each as in decode.
    for cuts in ([1], [2, 3], [64], [63, 65], [31, 67, 68, 69]):
        assert relative_error(run(model, TOKENS, *cuts), wanted) < 1e-5, cuts


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case] | {"eos_token_id": None})
    model = open_hybrid(tmp_path)
    assert model.config.delta is not None
    tokens = TOKENS[:20].tolist()
    with torch.no_grad():
        wanted = oracle.generate(torch.tensor([tokens]), max_new_tokens=30, do_sample=False)[0].tolist()
    attend, delta, position = DenseAttention(), PlainDelta(model.config.delta), 0
    while len(tokens) < 50:
        new = torch.tensor(tokens[position:])
        hidden = model.forward(new, torch.arange(position, len(tokens)), attend, delta)
        position = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    assert tokens == wanted


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_bf16_is_as_good_as_transformers_bf16(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    exact = expected(oracle, TOKENS).double()
    lowprec = expected(oracle.bfloat16(), TOKENS).double()
    logits = run(open_hybrid(tmp_path, dtype=torch.bfloat16), TOKENS)
    # The mean: where the best two experts of a token are close, rounding sends it elsewhere, in either implementation.
    assert (logits - exact).abs().mean() <= 2 * (lowprec - exact).abs().mean() + exact.abs().max() * 2**-8


def test_each_state_is_called_by_its_own_number(tmp_path: Path) -> None:
    make_folder(tmp_path, **CASES["qwen3_5_three_to_one"])
    model = open_hybrid(tmp_path)
    shape = model.config.delta
    assert shape is not None and model.config.linear_layers == (0, 1, 2) and model.config.num_attention_layers == 1
    seen: list[tuple[str, int]] = []
    dense, plain = DenseAttention(), PlainDelta(shape)

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        seen.append(("attend", layer))
        return dense(layer, *qkv)

    def delta(layer: int, mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        seen.append(("delta", layer))
        assert mixed_qkv.shape == (70, shape.conv_dim) and mixed_qkv.stride(1) == 1 and conv_weight.shape == (shape.conv_dim, shape.conv_width)
        assert g.shape == beta.shape == (70, shape.num_v_heads) and g.dtype == beta.dtype == torch.float32
        assert (g < 0).all() and (beta > 0).all() and (beta < 1).all()
        return plain(layer, mixed_qkv, conv_weight, g, beta)

    model.forward(TOKENS, torch.arange(70), attend, delta)
    assert seen == [("delta", 0), ("delta", 1), ("delta", 2), ("attend", 0)]


# Faults. Each must show in the logits, or the comparison proves nothing.


def plain_norms(model: HybridDecoder) -> None:
    for layer in model.layers:
        layer.mixer_norm.scale = layer.mixer_norm.scale - 1.0


def plain_head_norms(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, attention_layer.AttentionLayer):
            layer.mixer.head_scale = layer.mixer.head_scale - 1.0


def no_output_gate(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, attention_layer.AttentionLayer):
            layer.mixer.kind = attention_layer.AttentionKind(has_head_norms=True)


def zero_centred_output_norm(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, delta_layer.DeltaLayer):
            layer.mixer.norm.scale = layer.mixer.norm.scale + 1.0


def no_dt_bias(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, delta_layer.DeltaLayer):
            layer.mixer.dt_bias = torch.zeros_like(layer.mixer.dt_bias)


def conv_backwards(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, delta_layer.DeltaLayer):
            layer.mixer.conv_weight = layer.mixer.conv_weight.flip(1)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("fault", [plain_norms, plain_head_norms, no_output_gate, zero_centred_output_norm, no_dt_bias, conv_backwards])
def test_a_fault_shows_in_the_logits(fault: Callable[[HybridDecoder], None], case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    model = open_hybrid(tmp_path)
    fault(model)
    assert relative_error(run(model, TOKENS), expected(oracle, TOKENS)) > 1e-3


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3_5", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}}),
        ("qwen3_5", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("qwen3_next", {"num_experts_per_tok": 3}),
        ("qwen3_5_moe", {"num_experts_per_tok": 3}),
    ],
)
def test_a_wrong_config_shows_in_the_logits(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    edit_config(tmp_path, **change)
    assert relative_error(run(open_hybrid(tmp_path), TOKENS), expected(oracle, TOKENS)) > 1e-3


def test_a_state_that_is_not_carried_over_shows(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES["qwen3_5"])
    model = open_hybrid(tmp_path)
    assert model.config.delta is not None
    attend, shape = DenseAttention(), model.config.delta
    pieces = [model.forward(TOKENS[a:b], torch.arange(a, b), attend, PlainDelta(shape)) for a, b in ((0, 40), (40, 70))]
    error = (model.logits(torch.cat(pieces)) - expected(oracle, TOKENS)).abs().amax(1)
    assert error[:40].max() < 1e-4 < 1e-2 < error[40:].min()


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_nothing_waits_for_the_device(case: str, tmp_path: Path) -> None:
    # The meta device has no values to wait for: code that asks for one fails there, as it would under the capture of a CUDA graph.
    make_folder(tmp_path, **CASES[case])
    model = open_hybrid(tmp_path, device="meta", dtype=torch.bfloat16)
    shape = model.config.delta
    assert shape is not None

    def run_on_meta() -> torch.Tensor:
        tokens = torch.empty(7, dtype=torch.int64, device="meta")
        rows = torch.empty(7, shape.num_v_heads, shape.v_head_dim, dtype=torch.bfloat16, device="meta")
        return model.logits(model.forward(tokens, tokens, lambda layer, q, k, v: torch.empty_like(q), lambda *_: rows))

    assert run_on_meta().shape == (7, 300)
    first = model.layers[0]
    object.__setattr__(first, "mlp", lambda x: x if x.sum().item() else -x)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"item\(\).*meta"):
        run_on_meta()


def test_silu_is_on_the_gates() -> None:
    assert silu_and_multiply(torch.tensor([[0.0, 2.0]])).item() == 0.0
    assert silu_and_multiply(torch.tensor([[2.0, 0.5]])).item() == pytest.approx(1 / (1 + 2.718281828**-2.0))


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (10, 0), False),
        (torch.bfloat16, (8, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), True),
    ],
)
def test_a_mixture_says_where_its_grouped_product_waits(dtype: torch.dtype, capability: tuple[int, int], waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_product_waits(torch.device("cuda"), dtype) == waits
    assert not grouped_product_waits(torch.device("cpu"), dtype)
