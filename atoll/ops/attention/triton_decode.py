"""Triton decode attention for any GPU Triton knows: split-KV over paged K/V, reading owned rows only.

One program takes one sequence, one KV head and one split of the sequence's tiles, for all query rows of that head (`query_len * group_size`, padded to a
power of two of at least 16, the height of a matrix multiply). Tiles that every query row sees in full carry no mask; the few others (the right edge, and
the left edge of a window) are peeled into a loop of their own. With one split the program writes the result, else `combine` merges the partial states.

Lines that end in `# owned: name` are the promise; tests/ops/test_mutation.py takes each out and sees the ownership tests fail.

Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); split-KV with a log-sum-exp merge, Flash-Decoding (Dao et al. 2023).
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from atoll.ops.attention.combine import LN_2, LOG2_E, add_sink, close_state, combine, has_dependent_launch, launch_options, owned_tiles
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV, is_power_of_two
from atoll.ops.quant.formats import is_fp8

MASKS_UNOWNED = True
GRAPH_SAFE = True

HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_SPLITS = 128

# How the query rows see the rows of one step.
FULL = tl.constexpr(0)
EDGE = tl.constexpr(1)
PARTLY = tl.constexpr(2)


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Why this backend cannot run `spec` on `device`, or None if it can."""
    if device.type != "cuda" and not interpreted():
        return f"device {device} is not a GPU (and TRITON_INTERPRET is not 1)"
    if spec.kv_format == "fp32":
        return "kv_format 'fp32' has no tensor-core path"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if not is_fp8(spec.kv_format) and spec.q_dtype != {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.kv_format]:
        return f"q_dtype {spec.q_dtype} differs from kv_format {spec.kv_format!r}"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return bool(triton.knobs.runtime.interpret)


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """Tuning for one batch shape: a pure function of its arguments. Measured on an H200 with D 256, HKV 2, GQA 8 (LOG.md, 2026-11-29)."""
    tuned = _config(spec, shape)
    # On AMD 4 or 5 stages spill, and at D 256 do not fit into gfx942's 64 KiB; for fp8 1 stage spills with Triton 3.7.1, 2 do not
    # (ahead-of-time builds, tests/ops/test_build.py; not run).
    return replace(tuned, num_stages=2 if is_fp8(spec.kv_format) else 1) if shape.amd else tuned


def _config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    fp8, rows = is_fp8(spec.kv_format), block_rows(spec)
    if spec.batch_invariant:
        # A fixed share per program: how a sequence is cut depends on its own length alone.
        tile, tiles_per_split = (64, 16) if rows <= 16 else (32, 32)
        # Two splits at least: with one the sink would be added before the division, with more after it, and the last bit shows.
        num_splits = max(2, -(-max_tiles(spec, shape, tile) // tiles_per_split))
        return DecodeConfig(tile, num_splits, tiles_per_split, 4 if rows <= 32 else 8, 3)
    programs = max(1, shape.batch * spec.num_kv_heads)
    tokens_per_sm = programs * min(shape.max_seq_len, spec.window or shape.max_seq_len) / shape.num_sms
    if rows > 32:
        # wgmma, whose M is 64, over two warpgroups
        return DecodeConfig(32, choose_num_splits(spec, shape, 32, shape.num_sms), 0, num_warps=8, num_stages=4)
    if rows > 16 or tokens_per_sm <= 128:
        # Latency: the smallest tile starts soonest.
        return DecodeConfig(32, choose_num_splits(spec, shape, 32, shape.num_sms), 0, num_warps=4, num_stages=4 if rows <= 16 else 5)
    if tokens_per_sm <= 512:
        # Two programs an SM hide each other's start and end; for bf16 one masked loop is quicker than a full and an edge one (12.4 against 13.2 us).
        return DecodeConfig(64, choose_num_splits(spec, shape, 64, 2 * shape.num_sms), 0, 4, 3, peel_above=0 if fp8 else 4)
    # Bandwidth: bf16 keeps 128 KiB in flight an SM with one program, fp8 needs two to convert as fast as it loads.
    slots = (2 if fp8 and tokens_per_sm > 1024 else 1) * shape.num_sms
    return DecodeConfig(64, choose_num_splits(spec, shape, 64, slots), 0, 4, 5)


def choose_num_splits(spec: DecodeSpec, shape: BatchShape, tile: int, slots: int) -> int:
    """The count of splits whose programs fill `slots` in the fewest rounds of the least work, each split paid for in the merge."""
    programs = max(1, shape.batch * spec.num_kv_heads)
    limit = min(max_tiles(spec, shape, tile), MAX_SPLITS)
    return min(range(1, limit + 1), key=lambda n: -(-programs * n // slots) / n * (1 + n / 128))


def max_tiles(spec: DecodeSpec, shape: BatchShape, tile: int) -> int:
    """Upper bound on the tiles of one sequence; a window may straddle one more tile at either edge."""
    tokens = shape.max_seq_len
    if spec.window is not None:
        tokens = min(tokens, spec.window + spec.query_len - 1 + tile)
    return max(1, -(-tokens // tile))


def block_rows(spec: DecodeSpec) -> int:
    """Query rows that one program takes: those of a KV head, padded to what a matrix multiply takes, up to the most that do not spill."""
    most = 32 if is_fp8(spec.kv_format) else 64
    return min(most, max(16, triton.next_power_of_2(spec.query_len * spec.group_size)))


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Launch the split kernel, and the combine kernel where there is more than one split."""
    spec, cfg = plan.spec, plan.config
    assert is_power_of_two(cfg.tile)
    split = cfg.num_splits > 1
    per_token = spec.kv_format == "fp8_token"
    k_scale_strides = kv.k_scale.stride() if per_token and kv.k_scale is not None else (0, 0, 0)
    v_scale_strides = kv.v_scale.stride() if per_token and kv.v_scale is not None else (0, 0, 0)
    rows = block_rows(spec)
    row_blocks = -(-spec.query_len * spec.group_size // rows)
    grid = (spec.num_kv_heads * row_blocks, plan.batch, cfg.num_splits)
    decode_split_kernel[grid](
        out,
        lse,
        plan.partial_o,
        plan.partial_lse,
        q,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        sinks,
        plan.seq_lens,
        plan.page_table,
        spec.scale,
        spec.soft_cap or 1.0,
        spec.window or 0,
        spec.query_len,
        cfg.num_splits,
        cfg.tiles_per_split,
        cfg.peel_above,
        *q.stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *k_scale_strides,
        *v_scale_strides,
        plan.page_table.stride(0),
        GROUP=spec.group_size,
        BLOCK_M=rows,
        ROW_BLOCKS=row_blocks,
        D=spec.head_dim,
        TILE=cfg.tile,
        S=spec.page_size,
        SPLIT=split,
        FP8=is_fp8(spec.kv_format),
        PER_TOKEN=per_token,
        TRANSPOSED_V=spec.v_layout == "transposed",
        CAUSAL=spec.causal,
        WINDOW=spec.window is not None,
        SOFT_CAP=spec.soft_cap is not None,
        SINKS=spec.sinks,
        MULTI_QUERY=spec.query_len > 1,
        MASK_KV=spec.mask_unowned_kv,
        INTERPRET=interpreted(),
        PDL=has_dependent_launch(q.device),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        **launch_options(q.device, cfg.max_registers),
    )
    if split:
        combine(out, lse, plan, sinks)


@triton.jit(do_not_specialize=["window", "query_len", "num_splits", "tiles_per_split", "peel_above", "stride_table_b"])
def decode_split_kernel(
    out_ptr,  # [B, QL, HQ, D]
    lse_ptr,  # [B, QL, HQ] fp32, natural
    partial_o_ptr,  # [B, HKV, NS, QL * G, D] fp32, written if SPLIT
    partial_lse_ptr,  # [B, HKV, NS, QL * G] fp32, base 2
    q_ptr,  # [B, QL, HQ, D]
    k_ptr,  # [P, HKV, S, D]
    v_ptr,  # [P, HKV, S, D] or, TRANSPOSED_V, [P, HKV, D, S]
    k_scale_ptr,  # FP8: [1], PER_TOKEN: [P, HKV, S]; fp32
    v_scale_ptr,
    sinks_ptr,  # [HQ] fp32
    seq_lens_ptr,  # [B] int32
    page_table_ptr,  # [B, MP] int32
    sm_scale,
    soft_cap,
    window,
    query_len,
    num_splits,
    tiles_per_split,
    peel_above,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_out_b,
    stride_out_t,
    stride_out_h,
    stride_lse_b,
    stride_lse_t,
    stride_lse_h,
    stride_k_p,
    stride_k_h,
    stride_k_s,
    stride_v_p,
    stride_v_h,
    stride_v_s,  # TRANSPOSED_V: stride of D, tokens are contiguous
    stride_ks_p,
    stride_ks_h,
    stride_ks_s,
    stride_vs_p,
    stride_vs_h,
    stride_vs_s,
    stride_table_b,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    S: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TRANSPOSED_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    MULTI_QUERY: tl.constexpr,
    MASK_KV: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Every byte read below was written by an earlier kernel of this stream; wait for it, then let combine be set up while this one runs.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_h = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    i_b = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + i_b)

    # Rows [window_start, seq_len) are owned; tiles that hold one are shared out over the splits.
    window_start, first_tile, last_tile, per_split, num_used = owned_tiles(seq_len, query_len, window, num_splits, tiles_per_split, TILE, WINDOW)
    if i_s >= num_used:
        return  # writes nothing, and whoever merges counts the splits by the same rule
    tile_lo = first_tile + i_s * per_split
    tile_hi = tl.minimum(tile_lo + per_split, last_tile)

    # Row r of the block is query token r // GROUP, head r % GROUP of this KV head.
    o_m = tl.program_id(0) % ROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D)
    o_t = o_m // GROUP
    o_h = i_h * GROUP + o_m % GROUP
    m_rows = o_t < query_len
    b_q = tl.load(q_ptr + i_b * stride_q_b + (o_t * stride_q_t + o_h * stride_q_h)[:, None] + o_d[None, :], mask=m_rows[:, None], other=0.0)
    q_scale = sm_scale
    if FP8:
        # fp16 holds e4m3 exactly; a power of two brings each row of q into its range.
        b_q = b_q.to(tl.float32)
        exponent = tl.ceil(tl.log2(tl.max(tl.abs(b_q), 1)))
        row_scale = tl.where(tl.abs(exponent) < 126.0, tl.exp2(exponent), 1.0)
        b_q = (b_q / row_scale[:, None]).to(tl.float16)
        q_scale = row_scale * sm_scale
        if not PER_TOKEN:
            q_scale = q_scale * tl.load(k_scale_ptr)
        q_scale = q_scale[:, None]

    # Rows [common_lo, common_hi) are seen by every query row, the other owned rows by some: at most 2 * (query_len - 1), all taken by the last split.
    # Tiles [full_lo, full_hi) hold nothing but common rows and need no mask; for a few tiles one masked loop is quicker than two.
    common_lo = tl.maximum(seq_len - window, 0) if WINDOW else 0
    common_hi = tl.maximum(seq_len - query_len + 1, 0) if CAUSAL else seq_len
    full_lo = tl.minimum(tl.maximum(tl.cdiv(common_lo, TILE), tile_lo), tl.maximum(tile_hi, tile_lo))
    full_hi = tl.maximum(tl.minimum(common_hi // TILE, tile_hi), full_lo)
    full_lo = tl.where(tile_hi - tile_lo > peel_above, full_lo, tile_lo)
    full_hi = tl.where(tile_hi - tile_lo > peel_above, full_hi, tile_lo)

    k_ptr += i_h * stride_k_h
    v_ptr += i_h * stride_v_h
    if PER_TOKEN:
        k_scale_ptr += i_h * stride_ks_h
        v_scale_ptr += i_h * stride_vs_h
    table_ptr = page_table_ptr + i_b * stride_table_b
    b_acc = tl.zeros([BLOCK_M, D], tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    o_n = tl.arange(0, TILE)
    for i_tile in tl.range(full_lo, full_hi):
        page, slot = _rows_of_tile(table_ptr, i_tile, seq_len, window_start, TILE, S, False)
        b_acc, b_sum, b_max = _attend_rows(
            b_acc, b_sum, b_max, b_q, q_scale, soft_cap, page, slot, o_n < TILE, o_t, o_n, seq_len - query_len, window, query_len,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s, stride_ks_p, stride_ks_s, stride_vs_p, stride_vs_s,
            FULL, D, TILE, S, FP8, PER_TOKEN, TRANSPOSED_V, CAUSAL, WINDOW, SOFT_CAP, MASK_KV, INTERPRET,
        )  # fmt: skip

    num_left = full_lo - tile_lo
    for i in tl.range(0, num_left + tile_hi - full_hi):
        i_tile = tl.where(i < num_left, tile_lo + i, full_hi + i - num_left)
        o_row = i_tile * TILE + o_n
        m_common = (o_row >= common_lo) & (o_row < common_hi)  # owned: rows
        page, slot = _rows_of_tile(table_ptr, i_tile, seq_len, window_start, TILE, S, True)
        b_acc, b_sum, b_max = _attend_rows(
            b_acc, b_sum, b_max, b_q, q_scale, soft_cap, page, slot, m_common, o_t, o_row, seq_len - query_len, window, query_len,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            stride_k_p, stride_k_s, stride_v_p, stride_v_s, stride_ks_p, stride_ks_s, stride_vs_p, stride_vs_s,
            EDGE, D, TILE, S, FP8, PER_TOKEN, TRANSPOSED_V, CAUSAL, WINDOW, SOFT_CAP, MASK_KV, INTERPRET,
        )  # fmt: skip

    if MULTI_QUERY and (CAUSAL or WINDOW):
        if i_s == num_used - 1:
            o_p = tl.arange(0, 16)
            num_left = tl.minimum(common_lo, seq_len) - window_start
            o_row = tl.where(o_p < num_left, window_start + o_p, tl.maximum(common_lo, common_hi) + o_p - num_left)
            m_owned = o_row < seq_len  # owned: partly seen rows
            page = tl.load(table_ptr + o_row // S, mask=m_owned, other=0).to(tl.int64)
            b_acc, b_sum, b_max = _attend_rows(
                b_acc, b_sum, b_max, b_q, q_scale, soft_cap, page, o_row % S, m_owned, o_t, o_row, seq_len - query_len, window, query_len,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                stride_k_p, stride_k_s, stride_v_p, stride_v_s, stride_ks_p, stride_ks_s, stride_vs_p, stride_vs_s,
                PARTLY, D, 16, 1, FP8, PER_TOKEN, TRANSPOSED_V, CAUSAL, WINDOW, SOFT_CAP, MASK_KV, INTERPRET,
            )  # fmt: skip

    if FP8 and not PER_TOKEN:
        b_acc = b_acc * tl.load(v_scale_ptr)
    if SPLIT:
        rows = query_len * GROUP
        i_first = (i_b * (tl.num_programs(0) // ROW_BLOCKS) + i_h) * num_splits
        b_state, b_state_lse = close_state(b_acc, b_sum[:, None], b_max[:, None])
        o_state = (i_first + i_s) * rows + o_m
        tl.store(partial_o_ptr + o_state[:, None] * D + o_d[None, :], b_state, mask=m_rows[:, None])
        tl.store(partial_lse_ptr + o_state[:, None], b_state_lse, mask=m_rows[:, None])
        return
    if SINKS:
        b_decay, b_sum, b_max = add_sink(b_sum, b_max, tl.load(sinks_ptr + o_h, mask=m_rows, other=0.0))
        b_acc = b_acc * b_decay[:, None]
    b_out, b_lse = close_state(b_acc, b_sum[:, None], b_max[:, None])
    o_out = i_b * stride_out_b + o_t * stride_out_t + o_h * stride_out_h
    o_lse = i_b * stride_lse_b + o_t * stride_lse_t + o_h * stride_lse_h
    tl.store(out_ptr + o_out[:, None] + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_rows[:, None])
    tl.store(lse_ptr + o_lse[:, None], b_lse * LN_2, mask=m_rows[:, None])


@triton.jit
def _rows_of_tile(table_ptr, i_tile, seq_len, window_start, TILE: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr):
    """Page (int64) and slot of each row of a tile. An entry is read only if its page holds an owned row; the others may hold anything."""
    o_n = tl.arange(0, TILE)
    first_page = (i_tile * TILE) // S
    if S >= TILE:
        page = tl.load(table_ptr + first_page).to(tl.int64)
        slot = (i_tile * TILE) % S + o_n
    elif TILE // S <= 8:
        # One scalar load a page: the compiler then knows which rows share an address, and multiplies once a page.
        page = tl.zeros([TILE], tl.int64)
        slot = o_n % S
        for i in tl.static_range(TILE // S):
            m_page = True
            if EDGE:
                m_page = ((first_page + i) * S < seq_len) & ((first_page + i + 1) * S > window_start)  # owned: table
            one_page = tl.load(table_ptr + first_page + i, mask=m_page, other=0)
            page = tl.where(o_n // S == i, one_page.to(tl.int64), page)
    else:
        o_page = first_page + o_n // S
        slot = o_n % S
        if EDGE:
            m_page = (o_page * S < seq_len) & (o_page * S + S > window_start)  # owned: small pages
            page = tl.load(table_ptr + o_page, mask=m_page, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + o_page).to(tl.int64)
    return page, slot


@triton.jit
def _attend_rows(
    b_acc, b_sum, b_max, b_q, q_scale, soft_cap, page, slot, m_rows, o_t, o_row, position_0, window, query_len,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    stride_k_p, stride_k_s, stride_v_p, stride_v_s, stride_ks_p, stride_ks_s, stride_vs_p, stride_vs_s,
    KIND: tl.constexpr, D: tl.constexpr, N: tl.constexpr, S: tl.constexpr, FP8: tl.constexpr, PER_TOKEN: tl.constexpr, TRANSPOSED_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASK_KV: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over N rows at (`page`, `slot`): all of them (FULL), those in `m_rows` (EDGE), or each by its own query rows (PARTLY)."""
    o_d = tl.arange(0, D)
    MASK: tl.constexpr = MASK_KV and KIND != FULL
    o_k = page * stride_k_p + slot * stride_k_s
    if MASK:
        b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :], mask=m_rows[:, None], other=0.0)
    else:
        b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :])
    if TRANSPOSED_V:
        # [D, N]: tokens are contiguous within a page
        o_v = tl.max_contiguous((page * stride_v_p + slot)[None, :] + (o_d * stride_v_s)[:, None], [1, S if S < N else N])
        if MASK:
            b_v = tl.trans(tl.load(v_ptr + o_v, mask=m_rows[None, :], other=0.0))  # owned: transposed values
        else:
            b_v = tl.trans(tl.load(v_ptr + o_v))
    else:
        o_v = (page * stride_v_p + slot * stride_v_s)[:, None] + o_d[None, :]
        if MASK:
            b_v = tl.load(v_ptr + o_v, mask=m_rows[:, None], other=0.0)  # owned: values
        else:
            b_v = tl.load(v_ptr + o_v)

    b_s = _dot(b_q, tl.trans(_widen(b_k, FP8)), INTERPRET) * q_scale
    if PER_TOKEN:
        b_s = b_s * tl.load(k_scale_ptr + page * stride_ks_p + slot * stride_ks_s)[None, :]
    if SOFT_CAP:
        # cap * tanh(s / cap) as 2 * sigmoid(2 s / cap) - 1, which keeps NaN and saturates at both ends
        b_s = soft_cap * (2.0 / (1.0 + tl.exp2(b_s * (-2.0 * LOG2_E / soft_cap))) - 1.0)
    b_s = b_s * LOG2_E
    m_seen = m_rows[None, :]
    if KIND == PARTLY:
        if CAUSAL:
            m_seen = m_seen & (o_row[None, :] <= (position_0 + o_t)[:, None])
        if WINDOW:
            m_seen = m_seen & (o_row[None, :] > (position_0 + o_t)[:, None] - window)
    if KIND != FULL:
        # -inf, not a large finite number: a row that sees nothing must get probability 0, not 1
        b_s = tl.where(m_seen, b_s, float("-inf"))  # owned: scores

    # tl.max drops NaN, but exp2(NaN - top) does not: a NaN score reaches the sum and the output
    b_top = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = b_top if KIND == FULL else tl.where(b_top == float("-inf"), 0.0, b_top)
    b_decay = tl.exp2(b_max - b_shift)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = b_acc * b_decay[:, None]

    if PER_TOKEN:
        # P times the scale relative to the largest keeps P within fp16, whatever the scales.
        o_vs = page * stride_vs_p + slot * stride_vs_s
        if MASK:
            b_vs = tl.load(v_scale_ptr + o_vs, mask=m_rows, other=0.0)  # owned: value scales
        else:
            b_vs = tl.load(v_scale_ptr + o_vs)
        # Of rows that count alone: both flags round alike, whatever the scales of the others.
        vs_top = tl.max(b_vs if MASK or KIND == FULL else tl.where(m_rows, b_vs, 0.0), 0)
        vs_top = tl.where((vs_top > 0.0) & (vs_top < float("inf")), vs_top, 1.0)
        b_p = b_p * (b_vs / vs_top)[None, :]
        if MASK:
            b_p = tl.where(m_seen, b_p, 0.0)  # owned: seen scales
    b_v = _widen(b_v, FP8)
    b_p = b_p.to(b_v.dtype)
    if MASK and KIND == PARTLY:
        # A row that one query token sees may hold NaN, and another that does not see it must not meet it: 0 * NaN.
        for i_t in tl.range(0, query_len, num_stages=1):
            at = position_0 + i_t
            m_v = m_rows
            if CAUSAL:
                m_v = m_v & (o_row <= at)
            if WINDOW:
                m_v = m_v & (o_row > at - window)
            b_pv = _dot(b_p, tl.where(m_v[:, None], b_v, 0.0), INTERPRET)  # owned: partly seen values
            if PER_TOKEN:
                b_pv = b_pv * vs_top
            b_acc = tl.where((o_t == i_t)[:, None], b_acc + b_pv, b_acc)
    elif PER_TOKEN:
        b_acc += _dot(b_p, b_v, INTERPRET) * vs_top
    else:
        b_acc += _dot(b_p, b_v, INTERPRET)
    return b_acc, b_sum, b_top


@triton.jit
def _widen(x, FP8: tl.constexpr):
    """e4m3 to fp16, exactly."""
    return x.to(tl.float16) if FP8 else x


@triton.jit
def _dot(a, b, INTERPRET: tl.constexpr):
    """a @ b in fp32; Triton's interpreter multiplies bf16 operands wrongly (3.6.0), so there they are widened first."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)
