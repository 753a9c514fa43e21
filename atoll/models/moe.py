"""A mixture of experts with one shared expert, by grouped matrix products; knows no model."""

from collections.abc import Collection

import torch
import torch.nn.functional as F

from atoll.models.linear import Linear
from atoll.models.mlp import DenseMLP, mlp_shapes, silu_and_multiply
from atoll.models.model_config import MoEShape
from atoll.models.weight_reader import Shapes, WeightReader, prefixed

_FUSED_GATE_UP, _FUSED_DOWN = "experts.gate_up_proj", "experts.down_proj"


class SparseMoE:
    """Every token goes to its `experts_per_token` best experts and, scaled by a gate of its own, to the shared one.

    Nothing here waits for the device to say how many tokens an expert has; torch's grouped product may, and `grouped_product_waits` says where.
    """

    def __init__(self, shape: MoEShape, read: WeightReader) -> None:
        self.shape = shape
        self.router = Linear(read("gate.weight"))  # [E, H]
        self.gate_up, self.down = _read_experts(read, shape.num_experts)  # [E, 2 * I, H], [E, H, I]
        self.shared_expert = DenseMLP(read.under("shared_expert."))
        self.shared_gate = Linear(read("shared_expert_gate.weight"))  # [1, H]
        self.expert_ids = torch.arange(shape.num_experts, device=read.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._routed(x) + self.shared_gate(x).sigmoid() * self.shared_expert(x)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self._route(x)
        num_tokens, top_k = experts.shape
        # One row for each token and expert of it, sorted by expert.
        sorted_experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, self.expert_ids, right=True, out_int32=True)  # [E] where each expert's rows end
        rows = silu_and_multiply(F.grouped_mm(x[order // top_k], self.gate_up.transpose(1, 2), offs=ends))
        rows = F.grouped_mm(rows, self.down.transpose(1, 2), offs=ends)  # [T * K, H]
        # Back in the order of tokens, then a sum in a fixed order: adding rows at their tokens' places would not give the same bits each time.
        by_token = torch.empty_like(rows).index_copy_(0, order, rows).view(num_tokens, top_k, -1)
        return (by_token * weights[:, :, None]).sum(1).to(x.dtype)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, fp32, and ids, both `[T, K]`, of the experts that each token goes to."""
        weights, experts = self.router(x).float().softmax(-1).topk(self.shape.experts_per_token, -1)
        if self.shape.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts


def grouped_product_waits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product reads the experts' row counts back to the host.

    In bf16 on compute capability 9 and 10 it is one kernel that reads them on the device; elsewhere torch loops over the experts on the host, as of 2.10.
    That kernel wants rows whose bytes are a multiple of 16; the sizes of a model in bf16 are.
    """
    if device.type != "cuda":
        return False
    return dtype != torch.bfloat16 or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] not in (9, 10)


def moe_shapes(hidden_size: int, shape: MoEShape, held: Collection[str]) -> Shapes:
    """Experts are stored one by one, or all in one tensor where a name of `held` says so."""
    if any(name.endswith(_FUSED_GATE_UP) for name in held):
        experts: Shapes = {
            _FUSED_GATE_UP: (shape.num_experts, 2 * shape.expert_size, hidden_size),
            _FUSED_DOWN: (shape.num_experts, hidden_size, shape.expert_size),
        }
    else:
        one = mlp_shapes(hidden_size, shape.expert_size)
        experts = {name: size for e in range(shape.num_experts) for name, size in prefixed(f"experts.{e}.", one).items()}
    shared = prefixed("shared_expert.", mlp_shapes(hidden_size, shape.shared_expert_size))
    return {"gate.weight": (shape.num_experts, hidden_size), "shared_expert_gate.weight": (1, hidden_size)} | experts | shared


def _read_experts(read: WeightReader, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    if read.holds(_FUSED_GATE_UP):
        return read(_FUSED_GATE_UP), read(_FUSED_DOWN)
    each = [read.under(f"experts.{e}.") for e in range(num_experts)]
    gate_up = torch.stack([one("gate_proj.weight", "up_proj.weight") for one in each])
    return gate_up, torch.stack([one("down_proj.weight") for one in each])
