"""Decode attention that masks scores and nothing else: what the promise is measured against, in demonstrations and tests; "auto" never chooses it.

The old contract in plain PyTorch: whole tiles of every sequence are gathered through its page table, the scores of rows that it does not own become -inf,
and then probability 0 meets whatever V and V's scales hold there. Right where every unowned row is finite, NaN where one is not. It works on every device,
and on a GPU it waits for the longest length.
"""

import torch

from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV

MASKS_UNOWNED = False
GRAPH_SAFE = False  # reads the longest length back to the host

# Tokens; a sequence is read up to the end of the tile that the batch's longest one ends in, padded lanes included.
TILE = 64


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Every spec that does not ask for the promise, on every device."""
    return "it does not mask unowned rows, and the spec asks for that; set mask_unowned_kv=False" if spec.mask_unowned_kv else None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """Nothing to tune."""
    return DecodeConfig(tile=TILE)


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Fill `out` and `lse`; see `decode_attention`."""
    longest = int(plan.seq_lens.max())
    tokens = -(-longest // TILE) * TILE
    lanes = min(plan.page_table.shape[1], -(-tokens // plan.spec.page_size))
    values, sums = attend_every_row(q, kv, plan.page_table[:, :lanes], plan.seq_lens, plan.spec, sinks)
    out.copy_(values)
    lse.copy_(sums)


def attend_every_row(
    q: torch.Tensor,  # [B, QL, HQ, D]
    kv: PagedKV,
    page_table: torch.Tensor,  # [B, n] int32, every lane of which is read; one that names no page reads page 0
    seq_lens: torch.Tensor,  # [B] int32
    spec: DecodeSpec,
    sinks: torch.Tensor | None,  # [HQ] fp32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, QL, HQ, D] and lse [B, QL, HQ], both fp32, by the old contract."""
    ids = torch.where((page_table >= 0) & (page_table < kv.num_pages), page_table, 0)
    k = _rows(kv, kv.k, kv.k_scale, ids)  # [B, HKV, N, D]
    v = _rows(kv, kv.v if kv.v_layout == "plain" else kv.v.transpose(2, 3), kv.v_scale, ids)
    grouped = (q.shape[0], spec.query_len, spec.num_kv_heads, spec.group_size)
    scaled_q = (q.float() * spec.scale).view(*grouped, spec.head_dim)
    scores = torch.einsum("bthgd,bhnd->bthgn", scaled_q, k)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    seen = _seen(spec, seq_lens, k.shape[2])[:, :, None, None, :]  # [B, QL, 1, 1, N]
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    sink = sinks.view(spec.num_kv_heads, spec.group_size, 1) if sinks is not None else None
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    # The fault: a weight of exactly 0 times a value that nobody owns.
    values = torch.einsum("bthgn,bhnd->bthgd", weights, v) / total
    any_key = seen.any(-1, keepdim=True)
    values = torch.where(any_key, values, 0.0)
    sums = torch.where(any_key, top + torch.log(total), -torch.inf)
    return values.reshape(q.shape), sums.reshape(q.shape[:3])


def _rows(kv: PagedKV, pages: torch.Tensor, scale: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Every row of the pages in `ids` [B, n], owned or not: [B, HKV, n * S, D] fp32."""
    # As bytes: not every device gathers float8.
    rows = pages.view(torch.uint8)[ids].view(pages.dtype) if pages.dtype.itemsize == 1 else pages[ids]  # [B, n, HKV, S, D]
    rows = rows.float()
    if scale is not None:
        rows = rows * (scale[ids].unsqueeze(-1) if kv.kv_format == "fp8_token" else scale)
    return rows.transpose(1, 2).flatten(2, 3)


def _seen(spec: DecodeSpec, seq_lens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Which keys each query token attends to: [B, QL, N] bool."""
    key = torch.arange(num_rows, device=seq_lens.device)
    lens = seq_lens.long()[:, None, None]
    position = lens - spec.query_len + torch.arange(spec.query_len, device=seq_lens.device)[:, None]
    seen = (key < lens).expand(-1, spec.query_len, -1)
    if spec.causal:
        seen = seen & (key <= position)
    if spec.window is not None:
        seen = seen & (key > position - spec.window)
    return seen
