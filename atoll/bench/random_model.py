"""Models with random weights, made where they run: the shape of a published model to time, without its checkpoint. Knows no clock."""

import importlib
from collections.abc import Collection
from dataclasses import replace

import torch

from atoll.models import DeltaShape, HybridModel, Model, ModelConfig, MoEShape
from atoll.models.loader import MODELS, build_model

# Qwen3.5-35B-A3B, text part. Source: Qwen's published sizes, as given in the launch script scripts/models/qwen3.5-35B-A3B.sh of THUDM/slime.
_QWEN3_5_35B_A3B = ModelConfig(
    model_type="qwen3_5_moe",
    num_layers=40,
    hidden_size=2048,
    intermediate_size=0,
    num_q_heads=16,
    num_kv_heads=2,
    head_dim=256,
    vocab_size=248320,
    max_position=262144,
    rope_theta=1e7,
    rms_eps=1e-6,
    tie_embeddings=False,
    eos_token_ids=(),
    rotary_dim=64,
    linear_layers=tuple(i for i in range(40) if (i + 1) % 4),
    delta=DeltaShape(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=128, conv_width=4),
    moe=MoEShape(num_experts=256, experts_per_token=8, expert_size=512, shared_expert_size=512, normalize_weights=True),
)

SHAPES: dict[str, ModelConfig] = {
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    # The same kinds of layers, small enough for a CPU and for a test; heads as narrow as the kernels take.
    "tiny": replace(
        _QWEN3_5_35B_A3B,
        num_layers=4,
        hidden_size=64,
        num_q_heads=4,
        head_dim=64,
        vocab_size=512,
        max_position=4096,
        rotary_dim=16,
        linear_layers=(0, 1, 2),
        delta=DeltaShape(num_k_heads=2, num_v_heads=4, k_head_dim=16, v_head_dim=16, conv_width=4),
        moe=MoEShape(num_experts=8, experts_per_token=2, expert_size=32, shared_expert_size=32, normalize_weights=True),
    ),
}

# In the names of a checkpoint it tells that all experts of a layer lie in one tensor.
_FUSED = ("experts.gate_up_proj",)


class RandomWeights:
    """A `WeightSource` that makes each tensor when it is read, on the device: 35 billion numbers take seconds there and an hour on a host.

    Matrices are normal with variance 1 / in, so that activations stay of order 1 and the router spreads tokens over all experts. Vectors (norm scales and
    decays) hold 0.5, with which no layer is idle and no state grows.
    """

    path = "random weights"

    def __init__(self, config: ModelConfig, device: torch.device, *, seed: int = 0) -> None:
        self._shapes = _model_class(config).tensor_shapes(config, _FUSED if config.moe else ())
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor.fill_(0.5) if len(shape) == 1 else tensor.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)

    def num_elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())


def make_model(config: ModelConfig, weights: RandomWeights, device: torch.device, dtype: torch.dtype) -> Model | HybridModel:
    return build_model(_model_class(config), config, weights, device, dtype)


def _model_class(config: ModelConfig):  # type: ignore[no-untyped-def]
    module, _, attribute = MODELS[config.model_type].partition(":")
    return getattr(importlib.import_module(module), attribute)
