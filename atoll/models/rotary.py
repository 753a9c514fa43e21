"""Rotary position embedding, half-split: of the dimensions that turn, `i` turns with the one half their number on, angles in fp32."""

import math

import torch

from atoll.models.model_config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of dimensions, fp32 `[rotary dim / 2]`, scaling applied.

    Source: Su et al. 2021, RoFormer; the llama3 scaling is Meta's, as published with Llama 3.1.
    """
    width = config.rotary_dim or config.head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    inv_freq = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.factors, dtype=torch.float32)
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)  # within the trained length
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / scaling.factor)


def rotation(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, and sines with the first half negated, both fp32 `[T, 1, rotary dim]`: what `rotate` takes.

    Computed anew each step: two small kernels, against a table of 134 MB for Llama 3.1's 131,072 positions.
    """
    angles = positions[:, None, None].float() * inv_freq  # [T, 1, rotary dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of `x` `[T, heads, D]`, or as many leading dimensions of it as there are cosines; computed in fp32, returned in `x`'s dtype."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, signed_sin), x[..., width:]), -1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), signed_sin).to(x.dtype)
