"""The dense gated MLP: `down(silu(gate(x)) * up(x))`; knows no model."""

import torch
import torch.nn.functional as F

from atoll.models.linear import Linear
from atoll.models.weight_reader import Shapes, WeightReader


class DenseMLP:
    """Gate and up read the same input, so they are one matrix."""

    def __init__(self, read: WeightReader) -> None:
        self.gate_up = Linear(read("gate_proj.weight", "up_proj.weight"))  # [2 * I, H]
        self.down = Linear(read("down_proj.weight"))  # [H, I]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_multiply(self.gate_up(x)))


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 * I]`, gates first, to `[T, I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def mlp_shapes(hidden_size: int, intermediate_size: int) -> Shapes:
    return {
        "gate_proj.weight": (intermediate_size, hidden_size),
        "up_proj.weight": (intermediate_size, hidden_size),
        "down_proj.weight": (hidden_size, intermediate_size),
    }
