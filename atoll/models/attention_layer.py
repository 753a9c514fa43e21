"""Softmax attention as a layer: projections, norms of query and key heads, rotation, output gate; where keys and values live, it does not know."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atoll.models.base import Pass
from atoll.models.linear import Linear
from atoll.models.model_config import ModelConfig
from atoll.models.norm import read_scale
from atoll.models.rotary import rotate
from atoll.models.weight_reader import Shapes, WeightReader


@dataclass(frozen=True)
class AttentionKind:
    """What a model type's attention has beyond Llama's."""

    has_head_norms: bool = False  # an RMS norm over each query and each key head, before the rotation
    is_gated: bool = False  # q_proj gives a gate beside each query head; its sigmoid scales the head's output


class AttentionLayer:
    """Projections that read the same input are one matrix: query heads, key heads, value heads, gates."""

    def __init__(self, index: int, config: ModelConfig, kind: AttentionKind, read: WeightReader, *, zero_centred_norms: bool = False) -> None:
        self.index = index  # among the layers that attend
        self.kind = kind
        self.eps = config.rms_eps
        self.num_q, self.num_kv, self.head_dim = config.num_q_heads, config.num_kv_heads, config.head_dim
        self.proj = Linear(_read_projection(read, self.num_q, is_gated=kind.is_gated))  # [(HQ + 2 HKV (+ HQ)) * D, H]
        self.out = Linear(read("o_proj.weight"))  # [H, HQ * D]
        if kind.has_head_norms:
            q_scale, k_scale = (read_scale(read, name, zero_centred=zero_centred_norms).float() for name in ("q_norm.weight", "k_norm.weight"))
            self.head_scale = torch.cat((q_scale.expand(self.num_q, -1), k_scale.expand(self.num_kv, -1)))  # [HQ + HKV, D] fp32

    def __call__(self, x: torch.Tensor, shared: Pass) -> torch.Tensor:
        num_q, num_qk = self.num_q, self.num_q + self.num_kv
        heads = self.proj(x).unflatten(-1, (-1, self.head_dim))  # [T, heads, D]
        # q and k are normed and turned alike: once for both.
        qk = heads[:, :num_qk]
        if self.kind.has_head_norms:
            qk = F.rms_norm(qk.float(), (self.head_dim,), eps=self.eps) * self.head_scale
        rotated = rotate(qk, shared.cos, shared.signed_sin).to(x.dtype)
        out = shared.attend(self.index, rotated[:, :num_q], rotated[:, num_q:], heads[:, num_qk : num_qk + self.num_kv])  # [T, HQ, D]
        if self.kind.is_gated:
            out = out * heads[:, num_qk + self.num_kv :].sigmoid()
        return self.out(out.flatten(1))


def _read_projection(read: WeightReader, num_q_heads: int, *, is_gated: bool) -> torch.Tensor:
    if not is_gated:
        return read("q_proj.weight", "k_proj.weight", "v_proj.weight")
    # Stored head by head, each query's rows followed by its gate's.
    queries, gates = read("q_proj.weight").unflatten(0, (num_q_heads, 2, -1)).unbind(1)
    return torch.cat((queries.flatten(0, 1), read("k_proj.weight", "v_proj.weight"), gates.flatten(0, 1)))


def attention_shapes(config: ModelConfig, kind: AttentionKind) -> Shapes:
    hidden, q_rows, kv_rows = config.hidden_size, config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {
        "q_proj.weight": (q_rows * (2 if kind.is_gated else 1), hidden),
        "k_proj.weight": (kv_rows, hidden),
        "v_proj.weight": (kv_rows, hidden),
        "o_proj.weight": (hidden, q_rows),
    }
    if kind.has_head_norms:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes
