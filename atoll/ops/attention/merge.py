"""Merge of partial attention states in plain PyTorch, for callers that split one sequence's keys themselves."""

import torch

from atoll.errors import SpecError


def merge_states(
    outs: torch.Tensor,  # [N, ..., D]
    lses: torch.Tensor,  # [N, ...] fp32, natural
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over the union of N disjoint sets of keys: `(out [..., D] in outs' dtype, lse [...] fp32)`.

    Edge: a state with lse -inf is empty and its `out` is ignored, whatever it holds; if all are empty the result is 0 and -inf.
    NaN in a non-empty state is kept.
    Raises: SpecError when the shapes do not match.
    Source: softmax over a union of sets, lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i.
    """
    if outs.dim() < 2 or outs.shape[:-1] != lses.shape:
        raise SpecError(f"outs has shape {tuple(outs.shape)}, lses {tuple(lses.shape)}; pass outs [N, ..., D] and lses [N, ...]")
    lses = lses.float()
    lse = torch.logsumexp(lses, dim=0)
    empty = lses == -torch.inf
    weight = torch.exp(lses - torch.where(lse == -torch.inf, 0.0, lse)).unsqueeze(-1)
    states = torch.where(empty.unsqueeze(-1), 0.0, outs.float())
    return (weight * states).sum(dim=0).to(outs.dtype), lse
