"""Decode attention by its definition: plain PyTorch in fp32, one sequence and one query token at a time. Knows no tile and no split.

The rows that a query token attends to are contiguous, so they are sliced out and nothing is masked: what lies in any other row cannot matter.
It is the oracle of the other backends and the decode backend of the CPU engine. On a GPU it reads the lengths back, which waits for the device.
"""

import torch

from atoll.ops.attention.gather import gather_rows
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV

MASKS_UNOWNED = True


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Every spec, on every device."""
    return None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """Nothing to tune."""
    return DecodeConfig(num_splits=1)


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Fill `out` and `lse`; see `decode_attention`."""
    spec = plan.spec
    heads = (spec.num_kv_heads, spec.group_size)
    sink = sinks.view(*heads, 1) if sinks is not None else None
    for i_b, seq_len in enumerate(plan.seq_lens.tolist()):
        page_ids = plan.page_table[i_b]
        start = spec.window_start(seq_len)
        if seq_len:
            k, v = gather_rows(kv, page_ids, start, seq_len)  # [HKV, seq_len - start, D]
            # A fresh tensor per sequence, so that its alignment, and with it the bits, do not depend on its place in the batch.
            scaled_q = q[i_b].float() * spec.scale  # [QL, HQ, D]
        for i_q in range(spec.query_len):
            lo, hi = visible_rows(spec, seq_len, i_q)
            if lo >= hi:
                out[i_b, i_q] = 0.0
                lse[i_b, i_q] = -torch.inf
                continue
            seen = slice(lo - start, hi - start)
            b_out, b_lse = _attend(scaled_q[i_q].view(*heads, -1), k[:, seen], v[:, seen], spec.soft_cap, sink)
            if not spec.mask_unowned_kv:
                b_out += _leak(kv, page_ids, lo, hi)
            out[i_b, i_q] = b_out.view(spec.num_q_heads, -1)
            lse[i_b, i_q] = b_lse.view(-1)


def visible_rows(spec: DecodeSpec, seq_len: int, i_q: int) -> tuple[int, int]:
    """The keys `lo <= j < hi` that query token `i_q` of a sequence attends to; none when `lo >= hi`."""
    position = seq_len - spec.query_len + i_q
    lo = 0 if spec.window is None else max(0, position - spec.window + 1)
    hi = min(seq_len, position + 1) if spec.causal else seq_len
    return lo, hi


def _attend(
    scaled_q: torch.Tensor,  # [HKV, G, D]
    k: torch.Tensor,  # [HKV, n, D]
    v: torch.Tensor,  # [HKV, n, D]
    soft_cap: float | None,
    sink: torch.Tensor | None,  # [HKV, G, 1]
) -> tuple[torch.Tensor, torch.Tensor]:  # [HKV, G, D], [HKV, G, 1]
    scores = scaled_q @ k.transpose(1, 2)  # [HKV, G, n]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return weights @ v / total, top + torch.log(total)


def _leak(kv: PagedKV, page_ids: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """What the old contract adds to the output, `[HKV, 1, D]`: probability 0 times V of every row in the table that is not attended to.

    -0.0 where those values are finite, and adding -0.0 changes no bits; NaN where one of them is NaN or Inf.
    """
    ids = page_ids.clamp(0, kv.num_pages - 1)
    _, v = gather_rows(kv, ids, 0, ids.shape[0] * kv.k.shape[2])
    unseen = torch.cat([v[:, :lo], v[:, hi:]], dim=1)
    return -(unseen.abs() * 0.0).sum(1, keepdim=True)
