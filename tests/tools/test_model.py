"""The model that is trained is Qwen3.5's: transformers computes the same from what it exports, and its recurrent form agrees with its chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.demo_model.decode import Decoder, result_of
from tools.demo_model.delta import scan_chunks, unit_lower_inverse
from tools.demo_model.model import Shape, Weights, init_weights, logits, predict_two_ahead, trunk
from tools.demo_model.optimizer import orthogonalize, rate
from tools.demo_model.train import export, forward

SHAPE = Shape(vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=4, head_dim=16, rotary_dim=4, k_head_dim=16, v_head_dim=16)


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Away from their initial values, which would hide a fault."""
    torch.manual_seed(0)
    made = init_weights(SHAPE)
    for name, weight in made.items():
        weight += torch.randn_like(weight) * (0.2 if "norm" in name or weight.ndim == 2 else 0.05)
    return {name: weight.bfloat16().float() for name, weight in made.items()}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, SHAPE.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def ours(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    return logits(trunk(tokens, weights, SHAPE, torch.float32), weights)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def test_transformers_computes_the_same(weights: Weights, tokens: torch.Tensor, ours: torch.Tensor, tmp_path: Path) -> None:
    export(weights, SHAPE, tmp_path)
    oracle = load(tmp_path)
    assert type(oracle).__name__ == "Qwen3_5ForCausalLM"
    wanted = oracle(tokens).logits
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["layers.0.linear_attn.dt_bias", "layers.3.self_attn.q_norm.weight", "layers.2.linear_attn.conv1d.weight"])
def test_control_a_changed_weight_is_seen(name: str, weights: Weights, tokens: torch.Tensor, ours: torch.Tensor) -> None:
    changed = weights | {f"model.{name}": weights[f"model.{name}"] + 0.05}
    other = logits(trunk(tokens, changed, SHAPE, torch.float32), changed)
    assert (ours - other).abs().max() > 1e-4 * ours.abs().max()


def test_token_by_token_equals_chunks(weights: Weights, tokens: torch.Tensor, ours: torch.Tensor) -> None:
    decoder = Decoder(weights, SHAPE, len(tokens), tokens.shape[1], torch.float32)
    steps = torch.stack([decoder.step(tokens[:, i]) for i in range(tokens.shape[1])], 1)
    assert (steps - ours).abs().max() <= 2e-5 * ours.abs().max()


def test_all_weights_learn(weights: Weights, tokens: torch.Tensor) -> None:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    losses = forward(torch.cat((tokens, tokens[:, :2]), 1), leaves, SHAPE, torch.float32)
    sum(losses).backward()
    assert [name for name, weight in leaves.items() if weight.grad is None or not weight.grad.abs().sum() > 0] == []


def test_two_ahead_sees_the_next_token_and_no_later_one(weights: Weights, tokens: torch.Tensor) -> None:
    hidden = trunk(tokens[:, :64], weights, SHAPE, torch.float32)
    next_ids = tokens[:, 1:65].clone()
    before = predict_two_ahead(hidden, next_ids, weights, SHAPE)
    next_ids[:, 40] = (next_ids[:, 40] + 1) % SHAPE.vocab_size
    after = predict_two_ahead(hidden, next_ids, weights, SHAPE)
    assert torch.equal(before[:, :40], after[:, :40]) and not torch.allclose(before[:, 40], after[:, 40])


@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_inverse_within_a_chunk(scale: float) -> None:
    torch.manual_seed(0)
    a = (torch.rand(4, 64, 64) * scale).tril(-1)
    wanted = torch.linalg.inv(torch.eye(64).double() + a.double())
    assert (unit_lower_inverse(a) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_gradients_of_inverse_and_scan() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 16, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unit_lower_inverse(x.tril(-1)), a)
    u, w, k = (torch.randn(3, 2, 4, width, dtype=torch.float64, requires_grad=True) for width in (6, 5, 5))
    gamma = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scan_chunks, (u, w, k, gamma))


def test_the_optimizer_turns_and_comes_to_rest() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(2, 32, 64)).float())
    assert singular.min() > 0.5 and singular.max() < 1.4
    assert rate(0.0) == rate(0.4) == 1.0 and 0 < rate(0.9) < 0.2 and rate(1.0) == rate(1.1) == 0.0


@pytest.mark.parametrize(("text", "result"), [("4 = <<2+2=4>>4\n#### 4", "4"), ("#### 1,200.", "1200"), ("#### 5\n\n#### 6", "5"), ("no", None)])
def test_result_of_a_text(text: str, result: str | None) -> None:
    assert result_of(text) == result
