"""RMS normalization, and the two ways in which checkpoints store its scale; knows no model."""

import torch
import torch.nn.functional as F

from atoll.models.weight_reader import WeightReader


class RMSNorm:
    """`x / rms(x) * scale` over the last dimension. The result has `x`'s dtype."""

    def __init__(self, scale: torch.Tensor, eps: float) -> None:  # [width]
        self.scale = scale
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.scale.dtype:
            # torch accumulates 16-bit inputs in fp32 here.
            return F.rms_norm(x, self.scale.shape, self.scale, self.eps)
        return F.rms_norm(x.to(self.scale.dtype), self.scale.shape, self.scale, self.eps).to(x.dtype)


def read_scale(read: WeightReader, name: str, *, zero_centred: bool) -> torch.Tensor:
    """A norm's scale. Zero-centred checkpoints store its distance from 1; then it is kept in fp32, since 1 + w in bf16 would lose most of a small w."""
    return 1.0 + read(name, dtype=torch.float32) if zero_centred else read(name)
