"""Triton merge of a sequence's split states into its output; reads only the splits that were written."""

import functools

import torch
import triton
import triton.language as tl

from atoll.ops.attention.plan import DecodePlan


def combine(out: torch.Tensor, lse: torch.Tensor, plan: DecodePlan, sinks: torch.Tensor | None) -> None:
    """Launch the merge of `plan.partial_o` and `plan.partial_lse` (base 2) into `out` and `lse` (natural)."""
    spec, cfg = plan.spec, plan.config
    block_d = min(spec.head_dim, 64)
    combine_kernel[(plan.batch * spec.num_kv_heads, spec.query_len * spec.group_size, spec.head_dim // block_d)](
        out,
        lse,
        plan.partial_o,
        plan.partial_lse,
        sinks,
        plan.seq_lens,
        spec.window or 0,
        spec.num_kv_heads,
        spec.query_len,
        spec.group_size,
        cfg.num_splits,
        cfg.tiles_per_split,
        *out.stride()[:3],
        *lse.stride(),
        D=spec.head_dim,
        TILE=cfg.tile,
        BLOCK_D=block_d,
        # A fixed width, so that the order of the sum depends on the sequence's own splits alone.
        CHUNK=32,
        WINDOW=spec.window is not None,
        SINKS=spec.sinks,
        PDL=has_dependent_launch(out.device),
        num_warps=4,
        **launch_options(out.device),
    )


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be set up while the one before it still runs (NVIDIA, Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, max_registers: int | None = None) -> dict[str, int | bool]:
    """Launch options that only some of Triton's backends know."""
    options: dict[str, int | bool] = {}
    if has_dependent_launch(device):
        options["launch_pdl"] = True
    if max_registers is not None and device.type == "cuda" and torch.version.hip is None:
        options["maxnreg"] = max_registers
    return options


@triton.jit
def owned_tiles(seq_len, query_len, window, num_splits, tiles_per_split, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """A sequence's first owned row, its tiles `[first, last)` that hold one, and how many of them a split takes (at least 1)."""
    window_start = tl.maximum(seq_len - query_len - window + 1, 0) if WINDOW else 0
    first_tile = window_start // TILE
    last_tile = tl.cdiv(seq_len, TILE)
    per_split = tiles_per_split if tiles_per_split > 0 else tl.maximum(tl.cdiv(last_tile - first_tile, num_splits), 1)
    return window_start, first_tile, last_tile, per_split


@triton.jit
def add_sink(b_sum, b_max, b_sink):
    """The sink is one more key with value zero; a row that saw no key stays empty. Returns what to scale the values by, the new sum and maximum."""
    b_sink = b_sink * 1.4426950408889634
    b_top = tl.maximum(b_max, b_sink)
    b_decay = tl.exp2(b_max - b_top)
    return b_decay, tl.where(b_sum == 0.0, 0.0, b_sum * b_decay + tl.exp2(b_sink - b_top)), b_top


@triton.jit(do_not_specialize=["window", "num_kv_heads", "query_len", "group_size", "num_splits", "tiles_per_split"])
def combine_kernel(
    out_ptr,  # [B, QL, HQ, D]
    lse_ptr,  # [B, QL, HQ] fp32
    partial_o_ptr,  # [B, HKV, NS, QL * G, D] fp32
    partial_lse_ptr,  # [B, HKV, NS, QL * G] fp32, base 2
    sinks_ptr,  # [HQ] fp32
    seq_lens_ptr,  # [B] int32
    window,
    num_kv_heads,
    query_len,
    group_size,
    num_splits,
    tiles_per_split,
    stride_out_b,
    stride_out_t,
    stride_out_h,
    stride_lse_b,
    stride_lse_t,
    stride_lse_h,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_bh = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1)
    i_b = i_bh // num_kv_heads
    rows = query_len * group_size
    i_t = i_row // group_size
    i_h = (i_bh % num_kv_heads) * group_size + i_row % group_size
    seq_len = tl.load(seq_lens_ptr + i_b)
    _, first_tile, last_tile, per_split = owned_tiles(seq_len, query_len, window, num_splits, tiles_per_split, TILE, WINDOW)
    num_used = tl.cdiv(last_tile - first_tile, per_split)

    if PDL:
        # The split kernel's states; its own inputs were complete before it let this one start.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    b_sum = 0.0
    b_max = float("-inf")
    for i_first in tl.range(0, num_used, CHUNK, num_stages=1):
        o_s = i_first + tl.arange(0, CHUNK)
        m_used = o_s < num_used  # owned: splits
        o_state = (i_bh * num_splits + o_s) * rows + i_row
        b_lse = tl.load(partial_lse_ptr + o_state, mask=m_used, other=float("-inf"))
        b_o = tl.load(partial_o_ptr + o_state[:, None] * D + o_d[None, :], mask=m_used[:, None], other=0.0)
        b_top = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_decay = tl.exp2(b_max - b_shift)
        b_weight = tl.exp2(b_lse - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
        b_acc = b_acc * b_decay + tl.sum(b_weight[:, None] * b_o, 0)
        b_max = b_top
    if SINKS:
        b_decay, b_sum, b_max = add_sink(b_sum, b_max, tl.load(sinks_ptr + i_h))
        b_acc = b_acc * b_decay
    empty = b_sum == 0.0
    b_out = tl.where(empty, 0.0, b_acc / tl.where(empty, 1.0, b_sum))
    b_lse = tl.where(empty, float("-inf"), b_max + tl.log2(b_sum))
    tl.store(out_ptr + i_b * stride_out_b + i_t * stride_out_t + i_h * stride_out_h + o_d, b_out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + i_b * stride_lse_b + i_t * stride_lse_t + i_h * stride_lse_h, b_lse * 0.6931471805599453)
