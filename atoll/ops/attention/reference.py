"""Decode attention by its definition: plain PyTorch in fp32, one sequence and one query token at a time. Knows no tile and no split.

The rows that a query token attends to are contiguous, so they are sliced out and nothing is masked: what lies in any other row cannot matter.
It is the oracle of the other backends and the decode backend of the CPU engine. On a GPU it reads the lengths back, which waits for the device.
"""

import torch

from atoll.ops.attention.gather import gather_rows, gather_sequences
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV

MASKS_UNOWNED = True
GRAPH_SAFE = False  # reads the lengths back to the host

# fp32 elements in 64 bytes. Matrix libraries may sum in another order at another alignment, so rows of other widths are copied to memory of their own
# before they are multiplied: a sequence's bits must not depend on its place in the batch.
ALIGNED_DIM = 16


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Every spec, on every device."""
    return None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """Nothing to tune."""
    return DecodeConfig(num_splits=1)


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Fill `out` and `lse`; see `decode_attention`."""
    spec = plan.spec
    grouped = (plan.batch * spec.query_len, spec.num_kv_heads, spec.group_size)
    sink = sinks.view(spec.num_kv_heads, spec.group_size, 1) if sinks is not None else None
    scaled_q = (q.float() * spec.scale).view(*grouped, spec.head_dim)
    # What a query token without keys gets.
    b_out = torch.zeros_like(scaled_q)
    b_lse = torch.full((*grouped, 1), -torch.inf, device=q.device)

    seq_lens = plan.seq_lens.tolist()
    tables = plan.page_table.unbind()
    starts = [spec.window_start(seq_len) for seq_len in seq_lens]
    tokens = zip(scaled_q.unbind(), b_out.unbind(), b_lse.unbind(), strict=True)
    rows = gather_sequences(kv, tables, list(zip(starts, seq_lens, strict=True)))
    for seq_len, start, table, (k, v) in zip(seq_lens, starts, tables, rows, strict=True):  # k, v: [HKV, seq_len - start, D]
        for i_q in range(spec.query_len):
            token_q, token_out, token_lse = next(tokens)
            lo, hi = visible_rows(spec, seq_len, i_q)
            if lo >= hi:
                continue
            _attend(token_q, k.narrow(1, lo - start, hi - lo), v.narrow(1, lo - start, hi - lo), spec.soft_cap, sink, token_out, token_lse)
            if not spec.mask_unowned_kv:
                token_out += _leak(kv, table, lo, hi)
    out.copy_(b_out.view(out.shape))
    lse.copy_(b_lse.view(lse.shape))


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
    out: torch.Tensor,  # [HKV, G, D], written
    lse: torch.Tensor,  # [HKV, G, 1], written
) -> None:
    """One query token over the keys it sees, all of them."""
    if k.shape[2] % ALIGNED_DIM:
        scaled_q, k, v = scaled_q.clone(), k.clone(), v.clone()
    scores = torch.bmm(scaled_q, k.transpose(1, 2))  # [HKV, G, n]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    torch.div(torch.bmm(weights, v), total, out=out)
    torch.add(top, torch.log(total), out=lse)


def _leak(kv: PagedKV, page_ids: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """What the old contract adds to the output, `[HKV, 1, D]`: probability 0 times V of every row in the table that is not attended to.

    -0.0 where those values are finite, and adding -0.0 changes no bits; NaN where one of them is NaN or Inf.
    """
    ids = page_ids.clamp(0, kv.num_pages - 1)
    _, v = gather_rows(kv, ids, 0, ids.shape[0] * kv.k.shape[2])
    unseen = torch.cat([v[:, :lo], v[:, hi:]], dim=1)
    return -(unseen.abs() * 0.0).sum(1, keepdim=True)
