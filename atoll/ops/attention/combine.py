"""Triton merge of a sequence's split states into its output; reads only the splits that were written."""

import functools

import torch
import triton
import triton.language as tl

from atoll.ops.attention.plan import DecodePlan
from atoll.ops.attention.spec import DecodeSpec

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# One warp holds 32 splits of 128 values, so that no sum crosses warps: 1.3 to 2 us less per call than four warps over [16, 256] (H200, 1 x 1024 and 16 x 1024).
CHUNK = 32
BLOCK_D = 128
NUM_WARPS = 1
# More splits it takes 64 at a time: 1 us less than in two rounds (1 x 4096).
MAX_CHUNK = 64
# Up to 8 splits it takes 8, and of many rows 256 values: with four drafts 16 x 1024 in 13 us, 17; but 16 splits are no quicker by 16 (1 x 1024 5.6 us, 4.6).
MIN_CHUNK = 8
MANY_ROWS = 1024


def combine(out: torch.Tensor, lse: torch.Tensor, plan: DecodePlan, sinks: torch.Tensor | None) -> None:
    """Launch the merge of `plan.partial_o` and `plan.partial_lse` (base 2) into `out` and `lse` (natural)."""
    spec, cfg = plan.spec, plan.config
    chunk, block_d = merge_shape(spec, cfg.num_splits, plan.batch)
    combine_kernel[(spec.num_q_heads, plan.batch * spec.query_len, spec.head_dim // block_d)](
        out,
        lse,
        plan.partial_o,
        plan.partial_lse,
        sinks,
        plan.seq_lens,
        spec.window or 0,
        spec.query_len,
        cfg.num_splits,
        cfg.tiles_per_split,
        *out.stride()[:3],
        *lse.stride(),
        GROUP=spec.group_size,
        D=spec.head_dim,
        TILE=cfg.tile,
        BLOCK_D=block_d,
        CHUNK=chunk,
        WINDOW=spec.window is not None,
        SINKS=spec.sinks,
        PDL=has_dependent_launch(out.device),
        num_warps=NUM_WARPS,
        **launch_options(out.device),
    )


def merge_shape(spec: DecodeSpec, num_splits: int, batch: int) -> tuple[int, int]:
    """Splits that a program adds at a time, and values of each.

    With batch_invariant the order of their sum depends on the sequence's own splits, not on how many the plan has room for, nor on the batch.
    """
    if spec.batch_invariant or MIN_CHUNK < num_splits <= CHUNK:
        return CHUNK, min(spec.head_dim, BLOCK_D)
    if num_splits > CHUNK:
        return MAX_CHUNK, min(spec.head_dim, BLOCK_D // 2)
    many = batch * spec.query_len * spec.num_q_heads >= MANY_ROWS
    return MIN_CHUNK, min(spec.head_dim, 2 * BLOCK_D if many else BLOCK_D)


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
    """A sequence's first owned row, its tiles `[first, last)` that hold one, how many a split takes, and how many splits that makes (both 1 or more)."""
    window_start = tl.maximum(seq_len - query_len - window + 1, 0) if WINDOW else 0
    first_tile = window_start // TILE
    last_tile = tl.cdiv(seq_len, TILE)
    per_split = tiles_per_split if tiles_per_split > 0 else tl.maximum(tl.cdiv(last_tile - first_tile, num_splits), 1)
    return window_start, first_tile, last_tile, per_split, tl.maximum(tl.cdiv(last_tile - first_tile, per_split), 1)


@triton.jit
def merge_weights(b_max, b_top, b_lse):
    """Online softmax over states, base 2: the decay of the sum so far, each new state's weight, the new maximum, given the new states' own `b_top`."""
    b_top = tl.maximum(b_max, b_top)
    b_shift = tl.where(b_top == float("-inf"), 0.0, b_top)
    return tl.exp2(b_max - b_shift), tl.exp2(b_lse - b_shift), b_top


@triton.jit
def close_state(b_acc, b_sum, b_max):
    """The normalized values and the base-2 log-sum-exp of a running state; 0 and -inf when it saw no key."""
    empty = b_sum == 0.0
    return tl.where(empty, 0.0, b_acc / tl.where(empty, 1.0, b_sum)), tl.where(empty, float("-inf"), b_max + tl.log2(b_sum))


@triton.jit
def add_sink(b_sum, b_max, b_sink):
    """The sink is one more key with value zero; a row that saw no key stays empty. Returns what to scale the values by, the new sum and maximum."""
    b_sink = b_sink * LOG2_E
    b_top = tl.maximum(b_max, b_sink)
    b_decay = tl.exp2(b_max - b_top)
    return b_decay, tl.where(b_sum == 0.0, 0.0, b_sum * b_decay + tl.exp2(b_sink - b_top)), b_top


@triton.jit(do_not_specialize=["window", "query_len", "num_splits", "tiles_per_split"])
def combine_kernel(
    out_ptr,  # [B, QL, HQ, D]
    lse_ptr,  # [B, QL, HQ] fp32
    partial_o_ptr,  # [B, HKV, NS, QL * G, D] fp32
    partial_lse_ptr,  # [B, HKV, NS, QL * G] fp32, base 2
    sinks_ptr,  # [HQ] fp32
    seq_lens_ptr,  # [B] int32
    window,
    query_len,
    num_splits,
    tiles_per_split,
    stride_out_b,
    stride_out_t,
    stride_out_h,
    stride_lse_b,
    stride_lse_t,
    stride_lse_h,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_h = tl.program_id(0)
    i_b = (tl.program_id(1) // query_len).to(tl.int64)
    i_t = tl.program_id(1) % query_len
    seq_len = tl.load(seq_lens_ptr + i_b)
    _, _, _, _, num_used = owned_tiles(seq_len, query_len, window, num_splits, tiles_per_split, TILE, WINDOW)

    if PDL:
        # The kernel after this one is set up while the splits still run, and waits for all of this one itself; what it reads before its wait may be old.
        tl.extra.cuda.gdc_launch_dependents()
        # The split kernel's states; its own inputs were complete before it let this one start.
        tl.extra.cuda.gdc_wait()
    i_state = (i_b * (tl.num_programs(0) // GROUP) + i_h // GROUP) * num_splits
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    b_sum = 0.0
    b_max = float("-inf")
    for i_first in tl.range(0, num_used, CHUNK, num_stages=1):
        o_s = i_first + tl.arange(0, CHUNK)
        m_used = o_s < num_used  # owned: splits
        o_state = (i_state + o_s) * (query_len * GROUP) + i_t * GROUP + i_h % GROUP
        b_lse = tl.load(partial_lse_ptr + o_state, mask=m_used, other=float("-inf"))
        b_o = tl.load(partial_o_ptr + o_state[:, None] * D + o_d[None, :], mask=m_used[:, None], other=0.0)
        b_decay, b_weight, b_max = merge_weights(b_max, tl.max(b_lse, 0), b_lse)
        b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
        b_acc = b_acc * b_decay + tl.sum(b_weight[:, None] * b_o, 0)
    if SINKS:
        b_decay, b_sum, b_max = add_sink(b_sum, b_max, tl.load(sinks_ptr + i_h))
        b_acc = b_acc * b_decay
    b_out, b_lse = close_state(b_acc, b_sum, b_max)
    tl.store(out_ptr + i_b * stride_out_b + i_t * stride_out_t + i_h * stride_out_h + o_d, b_out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + i_b * stride_lse_b + i_t * stride_lse_t + i_h * stride_lse_h, b_lse * LN_2)
