"""The Triton kernels behind `delta_step`: one for the conv and its state, one for the delta rule in place in the slots."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are Triton's, and have no Python type.

import torch
import triton
import triton.language as tl

from atoll.ops.delta.spec import DeltaSpec
from atoll.ops.delta.step import StepTrace

# Columns of a state that one program holds: 128 x 32 fp32 are 32 registers a thread of 4 warps, and 32 heads of 128 columns make 128 programs of one sequence,
# about one for each of an H200's 132 multiprocessors. Chosen by that count and not yet by a measurement.
BLOCK_V = 32


def delta_step_triton(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    query_lens: torch.Tensor | None,
    out: torch.Tensor,
    trace: StepTrace | None,
) -> None:
    """Launch over checked arguments; see `delta_step`.

    Two kernels, since the q and k of one head are needed by every program that holds a part of its states, and none of them may shift the conv state before all
    have read it.
    """
    batch, query_len, _ = mixed_qkv.shape
    # After the conv and the norm: q of all heads, k, v. In fp32, and small beside the states.
    rows = torch.empty((batch, query_len, spec.conv_dim), dtype=torch.float32, device=states.device)
    # Without query_lens or a trace the kernels never touch these; any tensor will do.
    lens = query_lens if query_lens is not None else slots
    trace_states, conv_inputs = (trace.states, trace.conv_inputs) if trace is not None else (states[:, None], conv_states)
    flags = {"RAGGED": query_lens is not None, "TRACE": trace is not None}
    step_conv_kernel[(batch, 2 * spec.num_k_heads + spec.num_v_heads)](
        rows,
        conv_states,
        conv_inputs,
        mixed_qkv,
        conv_weight,
        slots,
        lens,
        query_len,
        spec.l2_eps,
        *rows.stride()[:2],
        *conv_states.stride(),
        *conv_inputs.stride(),
        *mixed_qkv.stride(),
        *conv_weight.stride(),
        slots.stride(0),
        lens.stride(0),
        HK=spec.num_k_heads,
        DK=spec.k_head_dim,
        DV=spec.v_head_dim,
        W=spec.conv_width,
        BLOCK_D=triton.next_power_of_2(max(spec.k_head_dim, spec.v_head_dim)),
        BLOCK_W=triton.next_power_of_2(spec.conv_width),
        **flags,
        num_warps=2,
    )
    block_v = min(BLOCK_V, triton.next_power_of_2(spec.v_head_dim))
    step_delta_kernel[(batch, spec.num_v_heads, triton.cdiv(spec.v_head_dim, block_v))](
        out,
        states,
        trace_states,
        rows,
        g,
        beta,
        slots,
        lens,
        query_len,
        spec.scale,
        *out.stride(),
        *states.stride()[:3],
        *trace_states.stride()[:4],
        *rows.stride()[:2],
        *g.stride(),
        *beta.stride(),
        slots.stride(0),
        lens.stride(0),
        HK=spec.num_k_heads,
        GROUP=spec.group_size,
        DK=spec.k_head_dim,
        DV=spec.v_head_dim,
        BLOCK_K=triton.next_power_of_2(spec.k_head_dim),
        BLOCK_V=block_v,
        **flags,
        num_warps=4,
    )


@triton.jit
def _num_tokens(slot, i_b, lens, query_len, stride_len, RAGGED: tl.constexpr):
    """Tokens of this sequence in this step; none without a slot."""
    num_tokens = query_len
    if RAGGED:
        num_tokens = tl.load(lens + i_b * stride_len)
    # int64, so that a token times a stride is.
    return tl.where(slot >= 0, num_tokens, 0).to(tl.int64)


@triton.jit(do_not_specialize=["query_len"])
def step_conv_kernel(
    rows,  # [B, QL, conv_dim] fp32, innermost contiguous; written: q and k after the norm, v after the conv
    conv_states,  # [R, conv_dim, W - 1], written
    conv_inputs,  # TRACE: [B, conv_dim, W - 1 + QL], written
    mixed_qkv,  # [B, QL, conv_dim]
    conv_weight,  # [conv_dim, W]
    slots,  # [B] int32
    lens,  # RAGGED: [B] int32
    query_len,
    l2_eps,
    stride_rows_b,
    stride_rows_t,
    stride_cs_r,
    stride_cs_c,
    stride_cs_w,
    stride_ci_b,
    stride_ci_c,
    stride_ci_w,
    stride_x_b,
    stride_x_t,
    stride_x_c,
    stride_w_c,
    stride_w_w,
    stride_slot,
    stride_len,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    RAGGED: tl.constexpr,
    TRACE: tl.constexpr,
):
    """One program: the channels of one head of q, k or v of one sequence, whose conv state no other program touches."""
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_b * stride_slot).to(tl.int64)
    num_tokens = _num_tokens(slot, i_b, lens, query_len, stride_len, RAGGED)
    if num_tokens > 0:
        normed = i_h < 2 * HK  # a head of q or k
        width = tl.where(normed, DK, DV)
        first = tl.where(normed, i_h * DK, 2 * HK * DK + (i_h - 2 * HK) * DV)
        o_d = tl.arange(0, BLOCK_D)
        o_c = first + o_d  # channels
        o_w = tl.arange(0, BLOCK_W).to(tl.int64)
        m_d = o_d < width
        p_state = conv_states + slot * stride_cs_r + (o_c * stride_cs_c)[:, None]
        p_x = mixed_qkv + i_b * stride_x_b + (o_c * stride_x_c)[:, None]
        b_weight = tl.load(conv_weight + (o_c * stride_w_c)[:, None] + o_w[None, :] * stride_w_w, mask=m_d[:, None] & (o_w < W)[None, :], other=0.0)
        for t in range(num_tokens):
            b_taps = _conv_taps(p_state, p_x, t + o_w, m_d, o_w < W, stride_cs_w, stride_x_t, W)
            b_sum = tl.sum(b_taps.to(tl.float32) * b_weight.to(tl.float32), 1)
            # Rounded as the plain definition does, so that prefill and decode see the same q, k and v.
            b_row = (b_sum * tl.sigmoid(b_sum)).to(mixed_qkv.dtype.element_ty).to(tl.float32)
            if normed:
                b_row *= tl.rsqrt(tl.sum(b_row * b_row, 0) + l2_eps)
            tl.store(rows + i_b * stride_rows_b + t * stride_rows_t + o_c, b_row, mask=m_d)
            if TRACE:
                p_input = conv_inputs + i_b * stride_ci_b + o_c * stride_ci_c + (W - 1 + t) * stride_ci_w
                tl.store(p_input, tl.load(mixed_qkv + i_b * stride_x_b + t * stride_x_t + o_c * stride_x_c, mask=m_d), mask=m_d)
        m_w = o_w < W - 1
        m_state = m_d[:, None] & m_w[None, :]
        if TRACE:
            b_before = tl.load(p_state + o_w[None, :] * stride_cs_w, mask=m_state)
            tl.store(conv_inputs + i_b * stride_ci_b + (o_c * stride_ci_c)[:, None] + o_w[None, :] * stride_ci_w, b_before, mask=m_state)
        b_after = _conv_taps(p_state, p_x, num_tokens + o_w, m_d, m_w, stride_cs_w, stride_x_t, W)
        # The state is shifted in place: every thread must have read its part of the old one before any writes.
        tl.debug_barrier()
        tl.store(p_state + o_w[None, :] * stride_cs_w, b_after, mask=m_state)


@triton.jit
def _conv_taps(p_state, p_x, o_input, m_d, m_w, stride_cs_w, stride_x_t, W: tl.constexpr):
    """Inputs `o_input` of the conv, `[BLOCK_D, BLOCK_W]`: 0 to W - 2 lie in the state, token t of this step is W - 1 + t."""
    m_old = o_input < W - 1
    b_old = tl.load(p_state + o_input[None, :] * stride_cs_w, mask=m_d[:, None] & (m_w & m_old)[None, :], other=0.0)
    b_new = tl.load(p_x + (o_input - (W - 1))[None, :] * stride_x_t, mask=m_d[:, None] & (m_w & ~m_old)[None, :], other=0.0)
    return tl.where(m_old[None, :], b_old, b_new)


@triton.jit(do_not_specialize=["query_len"])
def step_delta_kernel(
    out,  # [B, QL, HV, DV], written
    states,  # [R, HV, DK, DV] fp32, written
    trace_states,  # TRACE: [B, QL, HV, DK, DV] fp32, written
    rows,  # [B, QL, conv_dim] fp32 of step_conv_kernel
    g,  # [B, QL, HV] fp32
    beta,  # [B, QL, HV] fp32
    slots,  # [B] int32
    lens,  # RAGGED: [B] int32
    query_len,
    scale,
    stride_out_b,
    stride_out_t,
    stride_out_h,
    stride_out_d,
    stride_s_r,
    stride_s_h,
    stride_s_k,
    stride_tr_b,
    stride_tr_t,
    stride_tr_h,
    stride_tr_k,
    stride_rows_b,
    stride_rows_t,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    stride_slot,
    stride_len,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAGGED: tl.constexpr,
    TRACE: tl.constexpr,
):
    """One program: BLOCK_V columns of one head's state of one sequence, in registers over all tokens. Columns do not depend on each other."""
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(2).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    m_v = o_v < DV
    m_k = o_k < DK
    m_state = m_k[:, None] & m_v[None, :]
    slot = tl.load(slots + i_b * stride_slot).to(tl.int64)
    num_tokens = _num_tokens(slot, i_b, lens, query_len, stride_len, RAGGED)
    p_out = out + i_b * stride_out_b + i_h * stride_out_h + o_v * stride_out_d
    if num_tokens > 0:
        p_state = states + slot * stride_s_r + i_h * stride_s_h + o_k[:, None] * stride_s_k + o_v[None, :]
        p_trace = trace_states + i_b * stride_tr_b + i_h * stride_tr_h + o_k[:, None] * stride_tr_k + o_v[None, :]
        p_q = rows + i_b * stride_rows_b + i_h // GROUP * DK + o_k
        p_v = rows + i_b * stride_rows_b + 2 * HK * DK + i_h * DV + o_v
        p_g = g + i_b * stride_g_b + i_h * stride_g_h
        p_beta = beta + i_b * stride_beta_b + i_h * stride_beta_h
        b_state = tl.load(p_state, mask=m_state, other=0.0)
        for t in range(num_tokens):
            b_q = tl.load(p_q + t * stride_rows_t, mask=m_k, other=0.0) * scale
            b_k = tl.load(p_q + t * stride_rows_t + HK * DK, mask=m_k, other=0.0)
            b_v = tl.load(p_v + t * stride_rows_t, mask=m_v, other=0.0)
            b_state *= tl.exp(tl.load(p_g + t * stride_g_t))
            b_delta = tl.load(p_beta + t * stride_beta_t) * (b_v - tl.sum(b_k[:, None] * b_state, 0))
            b_state += b_k[:, None] * b_delta[None, :]
            b_out = tl.sum(b_q[:, None] * b_state, 0)
            tl.store(p_out + t * stride_out_t, b_out.to(out.dtype.element_ty), mask=m_v)
            if TRACE:
                tl.store(p_trace + t * stride_tr_t, b_state, mask=m_state)
        # Several threads may hold the same element of a small tile: all must have read the old state before one writes the new.
        tl.debug_barrier()
        tl.store(p_state, b_state, mask=m_state)
    b_zero = tl.zeros([BLOCK_V], dtype=out.dtype.element_ty)
    for t in range(num_tokens, query_len):
        tl.store(p_out + t * stride_out_t, b_zero, mask=m_v)
