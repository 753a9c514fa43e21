"""The gated delta rule for model tests: one sequence's conv and recurrent states, token by token as the paper writes it; no slots, no chunks."""

import torch
import torch.nn.functional as F

from atoll.models.model_config import DeltaShape


class PlainDelta:
    """A `delta` for one sequence: remembers every layer's conv inputs and state from call to call.

    Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), equation 10.
    """

    def __init__(self, shape: DeltaShape) -> None:
        self._shape = shape
        self._conv_inputs: dict[int, torch.Tensor] = {}  # layer -> [W - 1, conv_dim]
        self.states: dict[int, torch.Tensor] = {}  # layer -> [HV, DK, DV]

    def __call__(self, layer: int, mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        shape, group = self._shape, self._shape.num_v_heads // self._shape.num_k_heads
        key_dim = shape.num_k_heads * shape.k_head_dim
        q, k, v = F.silu(self._conv(layer, mixed_qkv, conv_weight)).float().split((key_dim, key_dim, shape.value_dim), -1)
        q, k = (unit(x.unflatten(-1, (-1, shape.k_head_dim))).repeat_interleave(group, 1) for x in (q, k))  # [T, HV, DK]
        v = v.unflatten(-1, (-1, shape.v_head_dim))  # [T, HV, DV]
        state = self.states.get(layer, torch.zeros(shape.num_v_heads, shape.k_head_dim, shape.v_head_dim))
        outs = []
        for t in range(len(v)):
            state = state * g[t].exp()[:, None, None]
            change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], change)
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * shape.k_head_dim**-0.5)
        self.states[layer] = state
        return torch.stack(outs).to(mixed_qkv.dtype)

    def _conv(self, layer: int, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        width = weight.shape[1]
        before = self._conv_inputs.get(layer, rows.new_zeros(width - 1, rows.shape[1]))
        rows = torch.cat((before, rows))
        self._conv_inputs[layer] = rows[len(rows) - (width - 1) :]
        return torch.stack([(rows[t : t + width] * weight.T).sum(0) for t in range(len(rows) - width + 1)])


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
