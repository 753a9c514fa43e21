"""Block-wise fp8 checkpoints: read as the exact products of numbers and scales, equal to transformers on those; what does not fit is named."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.errors import ModelError
from atoll.models import load_model
from atoll.models.block_fp8 import BlockFP8Weights, dequantize_blocks
from atoll.models.safetensors_weights import SafetensorsWeights
from tests.models import hybrids, test_llama
from tests.models.test_hybrid_loader import fuse_experts
from tests.models.test_llama import TOKENS, edit_config, expected, relative_error
from tests.models.test_loader import edit_tensors
from tests.models.tiny import MODEL_CLASSES, make_folder

FUSED = "qwen3_5_moe_fused"
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    **{name: hybrids.CASES[name] for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    FUSED: hybrids.CASES["qwen3_5_moe"],
}
# What Qwen's published checkpoints leave unconverted.
UNCONVERTED = ("embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate", "in_proj_a.", "in_proj_b.", "in_proj_ba.", "conv1d", "norm")
NAME = "model.layers.1.self_attn.k_proj.weight"
SCALE = NAME + "_scale_inv"
MLP = "model.layers.0.mlp.up_proj.weight"


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers and fp32 scales, one per block, so that a block's largest number becomes the format's."""
    num_rows, num_columns = (-(-size // step) for size, step in zip(weight.shape[-2:], block, strict=True))
    numbers, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(*weight.shape[:-2], num_rows, num_columns)
    for i in range(num_rows):
        for j in range(num_columns):
            at = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[..., i, j] = weight[at].abs().amax((-2, -1)) / 448.0
            numbers[at] = (weight[at] / scales[..., i, j, None, None]).to(torch.float8_e4m3fn)
    return numbers, scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = (torch.arange(size) // step for size, step in zip(numbers.shape[-2:], block, strict=True))
    return numbers.float() * scales.float()[..., rows[:, None], columns]


def is_converted(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and not any(part in name for part in UNCONVERTED)


def make_fp8_folder(folder: Path, case: str, block: tuple[int, int] = (32, 16), scale_dtype: torch.dtype = torch.float32) -> Any:
    """Write a tiny checkpoint in block-wise fp8; returns transformers' model with the real numbers that it stands for."""
    make_folder(folder, **CASES[case])
    quantized: dict[str, torch.Tensor] = {}

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        if case == FUSED:
            fuse_experts(tensors)
        for name in [name for name, tensor in tensors.items() if is_converted(name, tensor)]:
            numbers, scales = quantize(tensors[name], block)
            quantized[name], quantized[name + "_scale_inv"] = numbers, scales.to(scale_dtype)
            tensors[name] = dequantize(numbers, scales.to(scale_dtype), block)

    edit_tensors(folder, convert)
    oracle = MODEL_CLASSES[CASES[case]["model_type"]][1].from_pretrained(folder, dtype=torch.float32).eval()
    edit_tensors(folder, lambda tensors: tensors.update(quantized))
    edit_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)})
    return oracle


def logits(folder: Path, case: str) -> torch.Tensor:
    return test_llama.run(load_model(str(folder), dtype=torch.float32), TOKENS) if case == "qwen3" else hybrids.run(hybrids.open_hybrid(folder), TOKENS)


@pytest.mark.parametrize(("case", "block"), [*((case, (32, 16)) for case in CASES), ("qwen3_5", (128, 128)), ("qwen3", (7, 48))])
def test_logits_equal_transformers_on_the_real_numbers(case: str, block: tuple[int, int], tmp_path: Path) -> None:
    oracle = make_fp8_folder(tmp_path, case, block)
    assert relative_error(logits(tmp_path, case), expected(oracle, TOKENS)) < 1e-5


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_its_numbers_times_its_scales(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    make_fp8_folder(tmp_path, FUSED, scale_dtype=scale_dtype)
    stored = load_file(tmp_path / "model.safetensors")
    weights = BlockFP8Weights(SafetensorsWeights(tmp_path), (32, 16), torch.device("cpu"))
    num_fp8 = 0
    for name in weights.names():
        wanted = stored[name].float()
        if stored[name].dtype == torch.float8_e4m3fn:
            num_fp8 += 1
            wanted = dequantize(stored[name], stored[name + "_scale_inv"], (32, 16))
        assert weights.shape(name) == tuple(wanted.shape)
        assert torch.equal(weights.read(name, torch.float32), wanted), name
        # Rounded once, from the product in fp32.
        assert torch.equal(weights.read(name, torch.bfloat16), wanted.bfloat16()), name
    assert num_fp8 > 20 and len(stored) == len(weights.names()) + num_fp8


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe", FUSED])
def test_tensors_are_joined_on_the_device(case: str, tmp_path: Path) -> None:
    # A matrix of ours joins some that are fp8, and made on the device, with some that are not, and come from the file.
    make_fp8_folder(tmp_path, case)
    assert hybrids.open_hybrid(tmp_path, device="meta").embedding.device.type == "meta"


@pytest.mark.gpu
def test_a_gpu_makes_the_same_products(tmp_path: Path, device: torch.device) -> None:
    make_fp8_folder(tmp_path, FUSED)
    stored = SafetensorsWeights(tmp_path)
    here, there = BlockFP8Weights(stored, (32, 16), torch.device("cpu")), BlockFP8Weights(stored, (32, 16), device)
    for name in here.names():
        assert torch.equal(there.read(name, torch.bfloat16).cpu(), here.read(name, torch.bfloat16)), name


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (1, 1), (3, 257, 127)])
def test_blocks_of_128_cut_at_the_edges(shape: tuple[int, ...]) -> None:
    numbers, scales = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), (128, 128))
    assert torch.equal(dequantize_blocks(numbers, scales, (128, 128), torch.float32), dequantize(numbers, scales, (128, 128)))


def set_scale(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALE][0, 2] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(SCALE), rf"tensor {NAME} is fp8 and its scales {SCALE} are missing; the checkpoint is incomplete"),
        (
            lambda tensors: tensors.update({SCALE: tensors[SCALE].T.contiguous()}),
            rf"tensor {SCALE} has shape \(3, 2\), blocks of 32 x 16 of a tensor \(64, 48\) ask for \(2, 3\); the checkpoint is damaged, or its config",
        ),
        (lambda tensors: tensors.update({SCALE: torch.ones(())}), rf"tensor {SCALE} has shape \(\), blocks of 32 x 16"),
        (set_scale(math.nan), rf"tensor {SCALE} holds nan at \[0, 2\]; a scale is finite"),
        (set_scale(math.inf), rf"tensor {SCALE} holds inf at \[0, 2\]; a scale is finite"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].bfloat16()}), rf"tensor {NAME} is BF16 and has scales {SCALE}, which only F8_E4M3 has"),
        (lambda tensors: tensors.pop(NAME), rf"lacks tensor {NAME} \(1 missing"),
        (lambda tensors: tensors.update({"model.extra_scale_inv": torch.ones(1)}), r"holds tensor model\.extra_scale_inv \(1 in all\), which model type"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(edit: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path) -> None:
    make_fp8_folder(tmp_path, "qwen3")
    edit_tensors(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantized by method 'gptq'; only 'fp8' with a weight_block_size is supported, use an unquantized safetensors"),
        ({"quant_method": "compressed-tensors"}, r"quantized by method 'compressed-tensors'"),
        ({"bits": 4}, r"quantized by method None"),
        ({"quant_method": "fp8"}, r"weight_block_size None; it must be two whole numbers of at least 1, use an unquantized"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, r"fp8 of format 'e5m2'; only 'e4m3' is supported"),
        ("fp8", r"quantization_config = 'fp8'; it must be an object"),
    ],
)
def test_another_quantization_is_named(quantization: Any, message: str, tmp_path: Path) -> None:
    make_folder(tmp_path, "qwen3")
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path), dtype=torch.float32)


def test_control_scales_that_are_left_out_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_fp8_folder(tmp_path, "qwen3_5")
    monkeypatch.setattr("atoll.models.block_fp8.dequantize_blocks", lambda weight, scales, block, dtype: weight.to(dtype))
    assert relative_error(logits(tmp_path, "qwen3_5"), expected(oracle, TOKENS)) > 1e-1


def test_control_one_wrong_scale_shows(tmp_path: Path) -> None:
    oracle = make_fp8_folder(tmp_path, "qwen3")
    edit_tensors(tmp_path, lambda tensors: tensors[MLP + "_scale_inv"].view(-1)[3].mul_(1.5))
    assert relative_error(logits(tmp_path, "qwen3"), expected(oracle, TOKENS)) > 1e-3
