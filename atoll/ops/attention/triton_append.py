"""The Triton kernel behind `append_kv`: one program stores one token's K and V row of one KV head."""

import torch
import triton
import triton.language as tl

from atoll.ops.attention.spec import PagedKV
from atoll.ops.quant.formats import FP8_MAX, is_fp8
from atoll.ops.quant.quantize import TINY

NAN_BYTE = tl.constexpr(0x7F)


def append_kv_triton(kv: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Launch over checked arguments; see `append_kv`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    fp8, token_scale = is_fp8(kv.kv_format), kv.kv_format == "fp8_token"
    v_pages = kv.v if kv.v_layout == "plain" else kv.v.transpose(2, 3)
    # Without a scale the kernel never touches these; any tensor will do.
    k_scale = kv.k_scale if kv.k_scale is not None else kv.k
    v_scale = kv.v_scale if kv.v_scale is not None else kv.v
    append_kv_kernel[(num_tokens, num_kv_heads)](
        kv.k.view(torch.uint8) if fp8 else kv.k,
        v_pages.view(torch.uint8) if fp8 else v_pages,
        k_scale,
        v_scale,
        k,
        v,
        slots,
        *kv.k.stride(),
        *v_pages.stride(),
        *(k_scale.stride() if token_scale else (0, 0, 0)),
        *(v_scale.stride() if token_scale else (0, 0, 0)),
        *k.stride(),
        *v.stride(),
        slots.stride(0),
        PAGE_SIZE=kv.k.shape[2],
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        FP8=fp8,
        TOKEN_SCALE=token_scale,
        FP8_MAX=FP8_MAX,
        TINY=TINY,
        num_warps=1,
    )


@triton.jit
def append_kv_kernel(
    k_pages,  # [P, HKV, S, D] at any strides; fp8 as bytes
    v_pages,  # [P, HKV, S, D] at any strides: transposed V is a view
    k_scale,  # fp8_token [P, HKV, S], fp8_tensor [1], else unused
    v_scale,
    k,  # [T, HKV, D]
    v,  # [T, HKV, D]
    slots,  # [T] int64
    stride_kp_p,
    stride_kp_h,
    stride_kp_s,
    stride_kp_d,
    stride_vp_p,
    stride_vp_h,
    stride_vp_s,
    stride_vp_d,
    stride_ks_p,
    stride_ks_h,
    stride_ks_s,
    stride_vs_p,
    stride_vs_h,
    stride_vs_s,
    stride_k_t,
    stride_k_h,
    stride_k_d,
    stride_v_t,
    stride_v_h,
    stride_v_d,
    stride_slot,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    TOKEN_SCALE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    TINY: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_t * stride_slot)
    if slot >= 0:
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        o_d = tl.arange(0, BLOCK_D).to(tl.int64)
        m_d = o_d < D
        b_k = tl.load(k + i_t * stride_k_t + i_h * stride_k_h + o_d * stride_k_d, mask=m_d, other=0.0)
        b_v = tl.load(v + i_t * stride_v_t + i_h * stride_v_h + o_d * stride_v_d, mask=m_d, other=0.0)
        if FP8:
            p_k_scale = k_scale + page * stride_ks_p + i_h * stride_ks_h + offset * stride_ks_s
            p_v_scale = v_scale + page * stride_vs_p + i_h * stride_vs_h + offset * stride_vs_s
            b_k = _quantize_row(b_k.to(tl.float32), p_k_scale, TOKEN_SCALE, FP8_MAX, TINY)
            b_v = _quantize_row(b_v.to(tl.float32), p_v_scale, TOKEN_SCALE, FP8_MAX, TINY)
        p_k = k_pages + page * stride_kp_p + i_h * stride_kp_h + offset * stride_kp_s + o_d * stride_kp_d
        p_v = v_pages + page * stride_vp_p + i_h * stride_vp_h + offset * stride_vp_s + o_d * stride_vp_d
        tl.store(p_k, b_k.to(k_pages.dtype.element_ty), mask=m_d)
        tl.store(p_v, b_v.to(v_pages.dtype.element_ty), mask=m_d)


@triton.jit
def _quantize_row(b_row, p_scale, TOKEN_SCALE: tl.constexpr, FP8_MAX: tl.constexpr, TINY: tl.constexpr):
    """The e4m3fn bytes of the row over its scale: saturated at 448, NaN where the row was NaN or Inf. Writes the scale if it is the row's own."""
    # tl.max, tl.minimum and tl.maximum drop NaN, so what is not finite is set aside first and put back last.
    m_finite = tl.abs(b_row) < float("inf")
    if TOKEN_SCALE:
        b_amax = tl.max(tl.where(m_finite, tl.abs(b_row), 0.0), axis=0)
        b_scale = tl.div_rn(b_amax, FP8_MAX)
        b_scale = tl.where(b_scale >= TINY, b_scale, 1.0)
        tl.store(p_scale, b_scale)
    else:
        b_scale = tl.load(p_scale)
    # Not `/`, which is approximate on a GPU: the bytes must be those of the plain definition.
    b_quotient = tl.div_rn(b_row, b_scale)
    m_number = m_finite & (b_quotient == b_quotient)
    return tl.where(m_number, _encode_e4m3fn(tl.minimum(tl.maximum(b_quotient, -FP8_MAX), FP8_MAX)), NAN_BYTE).to(tl.uint8)


@triton.jit
def _encode_e4m3fn(b_x):
    """Numbers within ±448 to bytes, nearest even.

    In integers, since the conversion of Triton's interpreter loses the carry into the exponent (0.497 becomes 0.25), and not every GPU has one.
    """
    bits = b_x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 mantissa bits go, half of what they can hold is added before; the bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals are multiples of 2^-9, the distance of neighbours at 2^14, so that the addition rounds; the rest is the count of them.
    subnormal = (tl.abs(b_x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(tl.abs(b_x) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
