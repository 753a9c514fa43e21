"""Prefill attention: the last tokens of one sequence attend to its pages, gathered and handed to PyTorch. Knows no batch."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from atoll.errors import SpecError
from atoll.ops.attention.gather import gather_rows
from atoll.ops.attention.spec import PagedKV

# Query positions per step. On a CPU: 64 was the fastest of 16 to 256 for 512 tokens, and a lone token still costs little.
CPU_TILE = 32
# On a GPU, where a step must be worth its launches; bounds the scores of the plain path, [HQ, tile, keys] fp32.
GPU_TILE = 2048


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
    _check(q, kv, page_ids, seq_len, sinks)
    n, _, head_dim = q.shape
    first = seq_len - n  # position of q[0]
    plain = soft_cap is not None or sinks is not None
    on_cpu = q.device.type == "cpu"
    dtype = torch.float32 if on_cpu or plain else q.dtype
    k, v = gather_rows(kv, page_ids, _left_edge(first, window), seq_len, dtype)  # [HKV, owned, D]
    steps = _steps(first, seq_len, CPU_TILE if on_cpu else GPU_TILE, fill=on_cpu)
    # Rows of zeros on both sides, up to the grid: they stand for rows that no query of this call attends to.
    margins = (0, 0, _left_edge(first, window) - _left_edge(steps[0][0], window), steps[-1][1] - seq_len)
    k, v = F.pad(k, margins), F.pad(v, margins)
    padded_q = F.pad(q.transpose(0, 1).to(dtype), (0, 0, first - steps[0][0], steps[-1][1] - seq_len))  # [HQ, steps, D]
    scale = sm_scale if sm_scale is not None else head_dim**-0.5
    origin = _left_edge(steps[0][0], window)  # token of k[:, 0]
    outs = []
    for lo, hi in steps:
        left = _left_edge(lo, window)
        keys = slice(left - origin, hi - origin)
        step_q = padded_q[:, lo - steps[0][0] : hi - steps[0][0]]
        if plain:
            outs.append(_plain_attention(step_q, k[:, keys], v[:, keys], _mask(lo, hi, left, window, q.device), scale, soft_cap, sinks))
        else:
            outs.append(_torch_attention(step_q, k[:, keys], v[:, keys], lo, left, window, scale))
    out = torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]
    skipped = first - steps[0][0]
    return out[:, skipped : skipped + n].transpose(0, 1).to(q.dtype).contiguous()


def _left_edge(position: int, window: int | None) -> int:
    """First key that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _steps(first: int, seq_len: int, tile: int, fill: bool) -> list[tuple[int, int]]:
    """Query positions of each step; with `fill`, whole tiles of a grid that starts at token 0.

    Whole tiles are what makes chunked equal whole: a token is always computed at the same place of the same shape.
    """
    if fill:
        return [(lo, lo + tile) for lo in range(first - first % tile, seq_len, tile)]
    return [(lo, min(lo + tile, seq_len)) for lo in range(first, seq_len, tile)]


def _mask(lo: int, hi: int, left: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query at `lo` to `hi` sees a key from `left` to `hi`, `[hi - lo, hi - left]`."""
    query = torch.arange(lo, hi, device=device)[:, None]
    key = torch.arange(left, hi, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _torch_attention(
    q: torch.Tensor,  # [HQ, t, D]
    k: torch.Tensor,  # [HKV, m, D]
    v: torch.Tensor,
    lo: int,
    left: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:  # [HQ, t, D]
    num_queries, num_keys = q.shape[1], k.shape[1]
    q, k, v = q[None], k[None], v[None]
    mask: torch.Tensor | None = None
    if q.device.type == "cpu" or window is not None:
        mask = _mask(lo, lo + num_queries, left, window, q.device)
    elif num_queries > 1:
        # Not a dense mask, which would shut out the flash kernels.
        mask = causal_lower_right(num_queries, num_keys)
    if q.device.type == "cuda" and window is not None:
        # The kernel that takes a dense mask wants one KV head per query head.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])[0]


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


def _check(q: torch.Tensor, kv: PagedKV, page_ids: torch.Tensor, seq_len: int, sinks: torch.Tensor | None) -> None:
    _, num_kv_heads, page_size, head_dim = kv.k.shape
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise SpecError(
            f"q has shape {tuple(q.shape)}, the cache {num_kv_heads} KV heads of head_dim {head_dim}; pass [n, HQ, {head_dim}] with HQ a multiple of {num_kv_heads}"
        )
    if not 1 <= q.shape[0] <= seq_len:
        raise SpecError(f"q has {q.shape[0]} tokens, seq_len is {seq_len}; pass 1 to seq_len tokens, the last ones of the sequence")
    if page_ids.dim() != 1 or page_ids.dtype not in (torch.int32, torch.int64):
        raise SpecError(f"page_ids is {page_ids.dtype} of shape {tuple(page_ids.shape)}; pass int32 or int64 of shape [num_pages]")
    need = -(-seq_len // page_size)
    if page_ids.shape[0] < need:
        raise SpecError(f"seq_len {seq_len} needs {need} pages of {page_size} tokens, page_ids has {page_ids.shape[0]}; pass at least {need}")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[1],) or sinks.dtype != torch.float32):
        raise SpecError(f"sinks is {sinks.dtype} of shape {tuple(sinks.shape)}; pass torch.float32 of shape {(q.shape[1],)}")
    for name, tensor in (("q", q), ("page_ids", page_ids), ("sinks", sinks)):
        if tensor is not None and tensor.device != kv.k.device:
            raise SpecError(f"{name} is on {tensor.device}, the cache on {kv.k.device}; put both on one device")
