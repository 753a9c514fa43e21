"""Linear attention as a layer (gated delta net): projections, decay, output norm and gate; where conv and recurrent states live, it does not know."""

import torch
import torch.nn.functional as F

from atoll.models.base import Pass
from atoll.models.linear import Linear
from atoll.models.model_config import DeltaShape
from atoll.models.norm import RMSNorm
from atoll.models.weight_reader import Shapes, WeightReader


class DeltaLayer:
    """All projections are one matrix. Its rows: q, k and v of all heads (the conv's channels), output gates z, b and a.

    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), as parametrized by Qwen3-Next: beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias).
    """

    def __init__(self, index: int, shape: DeltaShape, eps: float, read: WeightReader, *, is_packed: bool) -> None:
        self.index = index  # among the layers of this kind
        self.shape = shape
        self.proj = Linear(_read_packed(read, shape) if is_packed else _read_split(read))
        self.conv_weight = read("conv1d.weight").squeeze(1)  # [conv_dim, W]
        # fp32 whatever the model's dtype: the decay is an exponential of an exponential.
        self.rate = -read("A_log", dtype=torch.float32).exp()  # [HV]
        self.dt_bias = read("dt_bias", dtype=torch.float32)  # [HV]
        self.norm = RMSNorm(read("norm.weight", dtype=torch.float32), eps)  # [DV], never zero-centred
        self.out = Linear(read("out_proj.weight"))  # [H, HV * DV]

    def __call__(self, x: torch.Tensor, shared: Pass) -> torch.Tensor:
        assert shared.delta is not None
        shape, num_heads = self.shape, self.shape.num_v_heads
        mixed_qkv, z, b, a = self.proj(x).split((shape.conv_dim, shape.value_dim, num_heads, num_heads), -1)
        g = self.rate * F.softplus(a.float() + self.dt_bias)
        rows = shared.delta(self.index, mixed_qkv, self.conv_weight, g, b.float().sigmoid())  # [T, HV, DV]
        gates = F.silu(z.float()).unflatten(-1, (num_heads, shape.v_head_dim))
        return self.out((self.norm(rows.float()) * gates).to(x.dtype).flatten(1))


def delta_shapes(hidden_size: int, shape: DeltaShape, *, is_packed: bool) -> Shapes:
    projections: Shapes
    if is_packed:
        projections = {
            "in_proj_qkvz.weight": (shape.conv_dim + shape.value_dim, hidden_size),
            "in_proj_ba.weight": (2 * shape.num_v_heads, hidden_size),
        }
    else:
        projections = {
            "in_proj_qkv.weight": (shape.conv_dim, hidden_size),
            "in_proj_z.weight": (shape.value_dim, hidden_size),
            "in_proj_b.weight": (shape.num_v_heads, hidden_size),
            "in_proj_a.weight": (shape.num_v_heads, hidden_size),
        }
    return projections | {
        "conv1d.weight": (shape.conv_dim, 1, shape.conv_width),
        "A_log": (shape.num_v_heads,),
        "dt_bias": (shape.num_v_heads,),
        "norm.weight": (shape.v_head_dim,),
        "out_proj.weight": (hidden_size, shape.value_dim),
    }


def _read_split(read: WeightReader) -> torch.Tensor:
    return read(*(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))


def _read_packed(read: WeightReader, shape: DeltaShape) -> torch.Tensor:
    """Stored by key head: its q, k, the v and z of its value heads; and beside it b and a of these. Put in order once, here."""
    group = shape.num_v_heads // shape.num_k_heads
    sizes = (shape.k_head_dim, shape.k_head_dim, group * shape.v_head_dim, group * shape.v_head_dim)
    qkvz = read("in_proj_qkvz.weight").unflatten(0, (shape.num_k_heads, -1)).split(sizes, 1)
    ba = read("in_proj_ba.weight").unflatten(0, (shape.num_k_heads, -1)).split((group, group), 1)
    return torch.cat([part.flatten(0, 1) for part in (*qkvz, *ba)])
