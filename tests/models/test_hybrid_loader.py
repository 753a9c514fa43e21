"""Hybrid checkpoints: every spelling of names and configs gives the same model; what does not fit is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from atoll.errors import ModelError
from atoll.models import load_model
from tests.models.hybrids import CASES, EXPERTS, HYBRID, MODELS, open_hybrid, run
from tests.models.test_llama import TOKENS, edit_config, expected, relative_error
from tests.models.test_loader import edit_tensors
from tests.models.tiny import SHAPE, make_folder, randomize

EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "num_position_embeddings": 16}


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Each layer's experts in two tensors, as Qwen3.5 MoE is published."""
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        each = [[tensors.pop(f"{experts}{e}.{part}_proj.weight") for part in ("gate", "up", "down")] for e in range(6)]
        tensors[experts + "gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
        tensors[experts + "down_proj"] = torch.stack([down for _, _, down in each])


def test_fused_experts_equal_single_ones(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES["qwen3_5_moe"])
    edit_tensors(tmp_path, fuse_experts)
    assert relative_error(run(open_hybrid(tmp_path), TOKENS), expected(oracle, TOKENS)) < 1e-5


@pytest.mark.parametrize(
    ("config_class", "model_class", "extra"),
    [
        (Qwen3_5Config, Qwen3_5ForConditionalGeneration, {"intermediate_size": 80}),
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, EXPERTS),
    ],
)
def test_the_text_part_of_a_model_with_an_image_encoder(config_class: Any, model_class: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    text = {key: value for key, value in SHAPE.items() if key != "intermediate_size"} | HYBRID | extra
    torch.manual_seed(0)
    oracle = model_class(config_class(text_config=text, vision_config=VISION, image_token_id=298, video_token_id=299)).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(48, 96)}))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in raw and raw["model_type"] == config_class.model_type
    tokens = TOKENS.clamp(max=290)
    model = open_hybrid(tmp_path)
    assert model.config.model_type == config_class.model_type and model.config.rotary_dim == 4
    assert relative_error(run(model, tokens), expected(oracle, tokens)) < 1e-5


@pytest.mark.parametrize("case", ["qwen3_next_some_dense", "qwen3_5", "qwen3_5_moe"])
def test_every_tensor_is_asked_for(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    model = open_hybrid(tmp_path)
    held = oracle.state_dict()
    shapes = type(model).tensor_shapes(model.config, held.keys())
    assert shapes == {name: tuple(tensor.shape) for name, tensor in held.items()}


def test_a_config_may_leave_out_what_hugging_face_assumes(tmp_path: Path) -> None:
    assumed = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "head_dim": 256}
    layers = {"num_hidden_layers": 5, "layer_types": None, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}
    oracle = make_folder(tmp_path, "qwen3_5", **assumed | layers)
    left_out = (*assumed, "layer_types", "num_key_value_heads", "rms_norm_eps", "linear_conv_kernel_dim", "rope_parameters", "max_position_embeddings")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in left_out}))
    model = open_hybrid(tmp_path)
    assert model.config.linear_layers == (0, 1, 2, 4) and model.config.rotary_dim == 64
    assert relative_error(run(model, TOKENS[:20]), expected(oracle, TOKENS[:20])) < 1e-5


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention"] * 2}, r"layer of type 'sliding_attention'; supported: linear_attention, full"),
        ("qwen3_5", {"layer_types": ["linear_attention"]}, r"names the types of 1 layers and has num_hidden_layers = 4"),
        ("qwen3_5", {"linear_num_value_heads": 3}, r"3 value heads for 2 key heads"),
        ("qwen3_5", {"linear_conv_kernel_dim": 3}, r"linear_attn\.conv1d\.weight has shape \(80, 1, 4\), the config asks for \(80, 1, 3\)"),
        ("qwen3_5", {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, r"turns 3 of 16 head dim"),
        ("qwen3_5", {"attn_output_gate": False}, r"attn_output_gate = false"),
        ("qwen3_5", {"text_config": [1]}, r"text_config = \[1\]; it must be an object"),
        ("qwen3_5_moe", {"num_experts_per_tok": 7}, r"7 experts of 6"),
        ("qwen3_5_moe", {"num_experts": 7}, r"lacks tensor model\.layers\.0\.mlp\.experts\.6\.down_proj\.weight \(12 missing"),
        ("qwen3_next", {"mlp_only_layers": [0]}, r"lacks tensor model\.layers\.0\.mlp\.down_proj\.weight"),
        ("qwen3_next", {"quantization_config": {"quant_method": "fp8"}}, r"fp8 with weight_block_size None; it must be two whole numbers"),
    ],
)
def test_a_config_that_does_not_fit(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_folder(tmp_path, **CASES[case])
    edit_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        open_hybrid(tmp_path)


def test_a_partial_rotation_is_not_silently_whole(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_config(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(ModelError, match=r"partial_rotary_factor = 0\.5; for this model type only 1"):
        load_model(str(tmp_path))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, **CASES["qwen3_next"])
    edit_tensors(tmp_path, lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(ModelError, match=f"lacks tensor {EXPERT} \\(1 missing of"):
        open_hybrid(tmp_path)


def test_a_misshaped_projection_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, **CASES["qwen3_next"])
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ModelError, match=rf"tensor {name} has shape \(127, 48\), the config asks for \(128, 48\)"):
        open_hybrid(tmp_path)


def test_what_lies_beside_a_decoder_is_let_be_only_in_hybrids(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"holds tensor mtp\.fc\.weight"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("model_type", MODELS)
def test_a_folder_is_loaded_by_its_type(model_type: str, tmp_path: Path) -> None:
    make_folder(tmp_path, **CASES[model_type])
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert type(loaded.model) is MODELS[model_type] and loaded.config.model_type == model_type
