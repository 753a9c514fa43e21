"""Tiny hybrid models for tests: the shapes, how one is opened, and how tokens are run through it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from atoll.models.hybrid_decoder import HybridDecoder
from atoll.models.json_file import read_json
from atoll.models.loader import build_model, open_weights
from atoll.models.model_config import config_from_hf
from atoll.models.qwen3_5 import Qwen3_5Model
from atoll.models.qwen3_5_moe import Qwen3_5MoeModel
from atoll.models.qwen3_next import Qwen3NextModel
from tests.models.dense import DenseAttention
from tests.models.plain_delta import PlainDelta

MODELS: dict[str, type[HybridDecoder]] = {"qwen3_next": Qwen3NextModel, "qwen3_5": Qwen3_5Model, "qwen3_5_moe": Qwen3_5MoeModel}

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

CASES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"model_type": "qwen3_next", **HYBRID, **EXPERTS},
    "qwen3_next_some_dense": {"model_type": "qwen3_next", **HYBRID, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_next_every_second": {"model_type": "qwen3_next", **HYBRID, **EXPERTS, "decoder_sparse_step": 2, "linear_num_value_heads": 2},
    "qwen3_5": {"model_type": "qwen3_5", **HYBRID},
    "qwen3_5_three_to_one": {"model_type": "qwen3_5", **HYBRID, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True},
    "qwen3_5_wide_conv": {"model_type": "qwen3_5", **HYBRID, "linear_conv_kernel_dim": 7, "linear_num_key_heads": 1},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **HYBRID, **EXPERTS},
    "qwen3_5_moe_one_expert": {"model_type": "qwen3_5_moe", **HYBRID, **EXPERTS, "num_experts_per_tok": 1},
}


def open_hybrid(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> HybridDecoder:
    config = config_from_hf(read_json(folder / "config.json"))
    return build_model(MODELS[config.model_type], config, open_weights(folder, config, torch.device(device)), torch.device(device), dtype)


def run(model: HybridDecoder, tokens: torch.Tensor, *cuts: int) -> torch.Tensor:
    """Logits of every position; the tokens are fed in pieces that end at `cuts`."""
    assert model.config.delta is not None
    attend, delta = DenseAttention(), PlainDelta(model.config.delta)
    hidden = [model.forward(tokens[a:b], torch.arange(a, b), attend, delta) for a, b in pairwise([0, *cuts, len(tokens)])]
    return model.logits(torch.cat(hidden))
