"""The floor for decode attention: split-KV in sixty lines of Triton, as an adapter to time beside the real kernel. Knows no window, cap, sink or draft.

`atoll bench decode --adapter atoll.bench.sketch:sketch`. Grid (B * HKV, splits), 16 query rows, whole tiles per split, every tile masked, a merge
kernel of its own.

Source: as `atoll.ops.attention.triton_decode`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from atoll.errors import BackendError
from atoll.ops.attention.spec import DecodeSpec
from atoll.ops.quant.formats import is_fp8
from atoll.probe.cases import DecodeProblem

LOG2_E = 1.4426950408889634
ROWS = 16
SLOTS = 264  # programs that two rounds of an H200's 132 multiprocessors take
MAX_SPLITS = 64  # that one merge program takes at once


def sketch(problem: DecodeProblem) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Prepare one problem: as `atoll.probe.adapters`. Raises BackendError for what the sketch leaves out."""
    spec, kv = problem.spec, problem.kv
    if reason := _refusal(spec, problem.device):
        raise BackendError(f"the sketch takes no such problem: {reason}; time another adapter")
    batch, heads, group, dim = problem.q.shape[0], spec.num_kv_heads, spec.group_size, spec.head_dim
    longest = int(problem.seq_lens.max())
    tile, stages = (64, 3) if batch * heads * longest > 128 * SLOTS else (32, 4)
    splits = max(1, min(SLOTS // (batch * heads), -(-longest // tile), MAX_SPLITS))
    seq_lens = problem.seq_lens.to(problem.device)
    partial = torch.empty(batch * heads, splits, group, dim, device=problem.device)
    partial_lse = torch.empty(batch * heads, splits, group, device=problem.device)
    out = torch.empty_like(problem.q)
    lse = torch.empty(problem.q.shape[:3], device=problem.device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        _split_kernel[(batch * heads, splits)](
            partial, partial_lse, problem.q, kv.k, kv.v, kv.k_scale, kv.v_scale, seq_lens, problem.page_table, spec.scale * LOG2_E, splits,
            *kv.k.stride()[:3], *kv.v.stride()[:3], problem.page_table.stride(0),
            heads, group, dim, tile, spec.page_size, is_fp8(spec.kv_format), num_warps=4, num_stages=stages,
        )  # fmt: skip
        _merge_kernel[(batch * heads * group,)](out, lse, partial, partial_lse, splits, group, dim, triton.next_power_of_2(splits))
        return out, lse

    return call


def _refusal(spec: DecodeSpec, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device {device} is not a GPU"
    if spec.kv_format not in ("bf16", "fp8_tensor") or spec.v_layout != "plain":
        return f"kv_format {spec.kv_format!r} with {spec.v_layout} V is neither 'bf16' nor 'fp8_tensor' with plain V"
    if spec.query_len > 1 or spec.group_size > ROWS:
        return f"query_len {spec.query_len} x group size {spec.group_size} is above 1 x {ROWS}"
    if spec.window is not None or spec.soft_cap is not None or spec.sinks:
        return "it has a window, a soft cap or sinks"
    return None


@triton.jit
def _split_kernel(
    o_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, seq_lens_ptr, table_ptr, scale, splits,
    stride_k_p, stride_k_h, stride_k_s, stride_v_p, stride_v_h, stride_v_s, stride_table_b,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, S: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    i_bh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    seq_len = tl.load(seq_lens_ptr + i_b)
    per_split = tl.cdiv(tl.cdiv(seq_len, TILE), splits)
    o_m, o_d, o_n = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, TILE)
    b_q = tl.load(q_ptr + (i_bh * GROUP + o_m)[:, None] * D + o_d[None, :], mask=(o_m < GROUP)[:, None], other=0.0)
    if FP8:
        b_q = b_q.to(tl.float16)
        scale = scale * tl.load(k_scale_ptr)
    b_acc = tl.zeros([16, D], tl.float32)
    b_sum = tl.zeros([16], tl.float32)
    b_max = tl.full([16], float("-inf"), tl.float32)
    for i_tile in range(i_s * per_split, tl.minimum((i_s + 1) * per_split, tl.cdiv(seq_len, TILE))):
        o_row = i_tile * TILE + o_n
        m_owned = o_row < seq_len
        page = tl.load(table_ptr + i_b * stride_table_b + o_row // S, mask=m_owned, other=0).to(tl.int64)
        o_k = page * stride_k_p + i_h * stride_k_h + o_row % S * stride_k_s
        o_v = page * stride_v_p + i_h * stride_v_h + o_row % S * stride_v_s
        b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :], mask=m_owned[:, None], other=0.0)
        b_v = tl.load(v_ptr + o_v[:, None] + o_d[None, :], mask=m_owned[:, None], other=0.0)
        if FP8:
            b_k, b_v = b_k.to(tl.float16), b_v.to(tl.float16)
        b_s = tl.where(m_owned[None, :], tl.dot(b_q, tl.trans(b_k)) * scale, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_decay, b_p = tl.exp2(b_max - b_top), tl.exp2(b_s - b_top[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = b_acc * b_decay[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_top
    if FP8:
        b_acc = b_acc * tl.load(v_scale_ptr)
    o_state = (i_bh * splits + i_s) * GROUP + o_m
    # An empty split weighs nothing in the merge.
    tl.store(o_ptr + o_state[:, None] * D + o_d[None, :], b_acc / tl.maximum(b_sum, 1e-30)[:, None], mask=(o_m < GROUP)[:, None])
    tl.store(lse_ptr + o_state, b_max + tl.log2(b_sum), mask=o_m < GROUP)


@triton.jit
def _merge_kernel(out_ptr, lse_ptr, o_ptr, part_lse_ptr, splits, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_s, o_d = tl.arange(0, SPLITS), tl.arange(0, D)
    o_state = (i_row // GROUP * splits + o_s) * GROUP + i_row % GROUP
    b_lse = tl.load(part_lse_ptr + o_state, mask=o_s < splits, other=float("-inf"))
    b_weight = tl.exp2(b_lse - tl.max(b_lse, 0))
    b_o = tl.load(o_ptr + o_state[:, None] * D + o_d[None, :], mask=(o_s < splits)[:, None], other=0.0)
    b_out = tl.sum(b_weight[:, None] * b_o, 0) / tl.sum(b_weight, 0)
    tl.store(out_ptr + i_row * D + o_d, b_out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + i_row, (tl.max(b_lse, 0) + tl.log2(tl.sum(b_weight, 0))) / 1.4426950408889634)
