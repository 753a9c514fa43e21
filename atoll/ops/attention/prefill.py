"""Prefill attention: the last tokens of one sequence attend to its pages, gathered and handed to PyTorch. Knows no batch."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from atoll.errors import SpecError
from atoll.ops.attention.gather import check_pages, gather_rows
from atoll.ops.attention.spec import PagedKV

# Query positions per step on a CPU. Of 16 to 256 on one core, 32 is within 5 % of the best from 100 new tokens on, and a lone token still costs only 0.2 ms.
CPU_TILE = 32
# The same on a GPU, where a step must be worth its launches. It bounds a window's dense mask, and on the plain path the fp32 scores, [HQ, tile, keys].
GPU_TILE = 2048
GPU_PLAIN_TILE = 256


def prefill_attention(
    q: torch.Tensor,  # [n, HQ, D], the last n tokens of the sequence
    kv: PagedKV,
    page_ids: torch.Tensor,  # [num_pages] int32 or int64; entries past the sequence's pages are not read
    seq_len: int,  # tokens, these n counted; their K and V are already in the pages
    *,
    sm_scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [HQ] fp32
) -> torch.Tensor:
    """Causal attention of `q` over the first `seq_len` rows of one sequence; returns `[n, HQ, D]` in q's dtype. No device sync.

    Computes in fp32 on a CPU, in q's dtype on a GPU. Reads no row that the sequence does not own.
    On a CPU a token's bits do not depend on how its prompt was cut into chunks.
    A NaN may reach other tokens of the same sequence that are computed beside it, never another sequence.

    Error: `|out - ref| <= 2 |lowprec - ref| + rounding` (tests/ops/test_prefill.py).
    Raises: SpecError for shapes that do not fit.
    """
    _check(q, kv, page_ids, seq_len, window, soft_cap, sinks)
    n, _, head_dim = q.shape
    first = seq_len - n  # position of q[0]
    plain = soft_cap is not None or sinks is not None
    on_cpu = q.device.type == "cpu"
    dtype = torch.float32 if on_cpu or plain else q.dtype
    scale = sm_scale if sm_scale is not None else head_dim**-0.5
    steps = _steps(first, seq_len, CPU_TILE if on_cpu else GPU_PLAIN_TILE if plain else GPU_TILE, window, fill=on_cpu)

    # Rows of zeros on both sides, up to the steps' edges: they stand for rows that no query of this call attends to.
    start, origin = _left_edge(first, window), steps[0].left
    before, after = first - steps[0].lo, steps[-1].hi - seq_len
    k, v = (_pad_rows(rows, start - origin, after) for rows in gather_rows(kv, page_ids, start, seq_len, dtype))
    queries = _pad_rows(q.transpose(0, 1).to(dtype), before, after)  # [HQ, before + n + after, D]
    outs = []
    for step in steps:
        step_q = queries[:, step.lo - steps[0].lo : step.hi - steps[0].lo]
        step_k, step_v = (rows[:, step.left - origin : step.hi - origin] for rows in (k, v))
        if plain:
            outs.append(_plain_attention(step_q, step_k, step_v, step.mask(window, q.device), scale, soft_cap, sinks))
        else:
            outs.append(_torch_attention(step_q, step_k, step_v, step, window, scale))
    return torch.cat(outs, dim=1)[:, before : before + n].transpose(0, 1).to(q.dtype).contiguous()


class _Step(NamedTuple):
    """Queries at positions `lo` to `hi`, and their keys from `left` to `hi`."""

    lo: int
    hi: int
    left: int

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """True where a query sees a key, `[hi - lo, hi - left]`."""
        query = torch.arange(self.lo, self.hi, device=device)[:, None]
        key = torch.arange(self.left, self.hi, device=device)
        seen = key <= query
        return seen if window is None else seen & (key > query - window)


def _steps(first: int, seq_len: int, tile: int, window: int | None, fill: bool) -> list[_Step]:
    """Cut the queries into tiles; with `fill`, whole tiles of a grid that starts at token 0.

    Whole tiles are what makes chunked equal whole: a token is always computed at the same place of the same shape.
    """
    if fill:
        edges = [(lo, lo + tile) for lo in range(first - first % tile, seq_len, tile)]
    else:
        edges = [(lo, min(lo + tile, seq_len)) for lo in range(first, seq_len, tile)]
    return [_Step(lo, hi, _left_edge(lo, window)) for lo, hi in edges]


def _left_edge(position: int, window: int | None) -> int:
    """First key that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _pad_rows(rows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """`[H, n, D]` to `[H, before + n + after, D]`, with zeros."""
    return F.pad(rows, (0, 0, before, after)) if before or after else rows


def _torch_attention(
    q: torch.Tensor,  # [HQ, t, D]
    k: torch.Tensor,  # [HKV, m, D]
    v: torch.Tensor,
    step: _Step,
    window: int | None,
    scale: float,
) -> torch.Tensor:  # [HQ, t, D]
    group = q.shape[0] // k.shape[0]
    on_cpu = q.device.type == "cpu"
    mask: torch.Tensor | None = None
    if on_cpu or window is not None:
        mask = step.mask(window, q.device)
    elif q.shape[1] > 1:
        # Not a dense mask, which would shut out the flash kernels. Imported only here: it brings the whole of torch.compile, seconds of any start on a CPU.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[1], k.shape[1])
    if not on_cpu and window is not None:
        # The GPU kernel that takes a dense mask wants one KV head per query head.
        k, v, group = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0), 1
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=group > 1)[0]


def _plain_attention(
    q: torch.Tensor,  # [HQ, t, D]
    k: torch.Tensor,  # [HKV, m, D]
    v: torch.Tensor,
    mask: torch.Tensor,  # [t, m]
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [HQ]
) -> torch.Tensor:  # [HQ, t, D]
    num_q_heads, num_queries, head_dim = q.shape
    grouped = q.reshape(k.shape[0], -1, head_dim)  # [HKV, G * t, D]
    scores = (grouped @ k.transpose(1, 2) * scale).view(num_q_heads, num_queries, -1)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        # One more key, whose value is zero.
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, num_queries, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]].reshape(k.shape[0], -1, k.shape[1])
    return (weights @ v).view(num_q_heads, num_queries, head_dim)


def _check(q: torch.Tensor, kv: PagedKV, page_ids: torch.Tensor, seq_len: int, window: int | None, soft_cap: float | None, sinks: torch.Tensor | None) -> None:
    check_pages(kv)
    _, num_kv_heads, page_size, head_dim = kv.k.shape
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise SpecError(f"q has shape {tuple(q.shape)}; pass [n, HQ, {head_dim}] with HQ a multiple of the cache's {num_kv_heads} KV heads")
    if not 1 <= q.shape[0] <= seq_len:
        raise SpecError(f"q has {q.shape[0]} tokens, seq_len is {seq_len}; pass 1 to seq_len tokens, the last ones of the sequence")
    if page_ids.dim() != 1 or page_ids.dtype not in (torch.int32, torch.int64):
        raise SpecError(f"page_ids is {page_ids.dtype} of shape {tuple(page_ids.shape)}; pass int32 or int64 of shape [num_pages]")
    need = -(-seq_len // page_size)
    if page_ids.shape[0] < need:
        raise SpecError(f"seq_len {seq_len} needs {need} pages of {page_size} tokens, page_ids has {page_ids.shape[0]}; pass at least {need}")
    if window is not None and window < 1:
        raise SpecError(f"window {window} is below 1; a query sees at least itself, or pass None for no window")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise SpecError(f"soft_cap {soft_cap} is not a positive finite number; None means no cap")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[1],) or sinks.dtype != torch.float32):
        raise SpecError(f"sinks is {sinks.dtype} of shape {tuple(sinks.shape)}; pass torch.float32 of shape {(q.shape[1],)}")
    for name, tensor in (("q", q), ("page_ids", page_ids), ("sinks", sinks)):
        if tensor is not None and tensor.device != kv.k.device:
            raise SpecError(f"{name} is on {tensor.device}, the cache on {kv.k.device}; put both on one device")
