"""The Gluon kernel of decode attention for Hopper: K and V tiles from swizzled shared memory as the 16-row operand of the multiply.

One program takes one sequence, one KV head and one split, for all query rows of that head (padded to 8 at least) or a block of them. fp8 rows are copied and
read as 16-bit pairs: a K fragment then holds neighbouring d of one token, so that q, permuted alike, is all that its conversion needs; a V fragment, read
transposed, holds two d of two tokens, which one byte permute turns into pairs of tokens. Tiles that every query row sees in full carry no mask; the others
are peeled.

Lines that end in `# owned: name` are the promise; tests/ops/test_mutation.py takes each out, on a GPU and in our interpreter of Gluon
(atoll/probe/gluon_interpreter.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from atoll.ops.attention.gluon_copies_sm90 import (
    _copied_scale_rows,
    _copy_tile,
    _first_copies,
    _head,
    _load_scales,
    _make_ring,
    _pages_of_tile,
    _scale_rows,
    lane_layout,
    program_barrier,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _dependent_launch(i_s):
    """griddepcontrol: wait for the kernel before, then let the one after be set up; a value passes through so that nothing moves above it."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r,~{memory}", [i_s], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _widen_pairs(x):
    """The e4m3 pairs of two neighbouring int16 as fp16: the first result has the bytes of each even int16, the second those of each odd one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        "=r,=r,r",
        [x],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _widen_halves(x):
    """The low and the high bytes (e4m3) of int16 as fp16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $2, $2, 0x3120; mov.b32 {lo, hi}, t; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        "=r,=r,r",
        [x],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _ones_before(row, i_tile, TILE: gl.constexpr, layout: gl.constexpr):
    """16 ones for each row of a tile before `row`, else zeros [TILE]: two by one instruction, whose number of ones is the rows left to `row`, times 16."""
    bits = (gl.minimum(gl.maximum(row - i_tile * TILE, 0), TILE) - gl.arange(0, TILE, layout=layout)) * 16
    return gl.inline_asm_elementwise("{ .reg .b32 n; max.s32 n, $1, 0; bmsk.clamp.b32 $0, 0, n; }", "=r,r,r", [bits], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def _keep(ones, x):
    """x of 16 bits where there are ones, else 0: two by one instruction."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, ones], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def _load_keys(k_tile, H: gl.constexpr, FP8: gl.constexpr, a_layout: gl.constexpr):
    """K as two operands [N, D / 2]."""
    if FP8:
        return _widen_pairs(k_tile.load(a_layout))
    else:
        return k_tile.slice(0, H, dim=1).load(a_layout), k_tile.slice(H, H, dim=1).load(a_layout)


@gluon.jit
def _read_values(v_tile, H: gl.constexpr, FP8: gl.constexpr, a_layout: gl.constexpr):
    """V transposed as it lies in shared memory: pairs of bytes [D / 2, N] twice, or two halves of 16 bits."""
    if FP8:
        b_v = v_tile.permute((1, 0)).load(a_layout)
        return b_v, b_v
    else:
        return v_tile.slice(0, H, dim=1).permute((1, 0)).load(a_layout), v_tile.slice(H, H, dim=1).permute((1, 0)).load(a_layout)


@gluon.jit
def _load_masked_values(v_tile, ones, H: gl.constexpr, FP8: gl.constexpr, MASK: gl.constexpr, a_layout: gl.constexpr):
    """V as two operands [D / 2, N]; with MASK zero where there are no `ones` [N]."""
    v0, v1 = _read_values(v_tile, H, FP8, a_layout)
    if MASK:
        ones = gl.expand_dims(ones, 0)
        if FP8:
            v0 = _keep(ones, v0)  # owned: values
        else:
            v0, v1 = _keep(ones, v0), _keep(ones, v1)  # owned: wide values
    if FP8:
        return _widen_halves(v0)
    else:
        return v0, v1


@gluon.jit
def _multiply_keys(
    k_tile, q0, q1, BOTH: gl.constexpr, M: gl.constexpr, H: gl.constexpr, TILE: gl.constexpr, FP8: gl.constexpr, WGMMA: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """A tile of K in shared memory times q, [TILE, M]; with WGMMA to be waited for, and BOTH halves in flight at once."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_s = gl.zeros([TILE, M], gl.float32, mma)
    k0, k1 = _load_keys(k_tile, H, FP8, a_layout)
    if WGMMA:
        b_s = warpgroup_mma(k0, q0.permute((1, 0)), b_s, is_async=True)
        if not BOTH:
            b_s = warpgroup_mma_wait(0, [b_s])
            k0, k1 = _load_keys(k_tile, H, FP8, a_layout)
        return warpgroup_mma(k1, q1.permute((1, 0)), b_s, is_async=True)
    else:
        # Two chains of products, half as long.
        return mma_v2(k0, q0, b_s) + mma_v2(k1, q1, b_s)


@gluon.jit
def _multiply_values(v0, v1, b_p, acc0, acc1, FP8: gl.constexpr, WGMMA: gl.constexpr):
    """V, as `_read_values` has it, times P added to the two halves of the sum."""
    if FP8:
        v0, v1 = _widen_halves(v0)
    if WGMMA:
        # All of P is there.
        program_barrier()
        acc0 = warpgroup_mma(v0, b_p, acc0, is_async=True)
        acc1 = warpgroup_mma(v1, b_p, acc1, is_async=True)
        return warpgroup_mma_wait(0, [acc0, acc1])
    else:
        return mma_v2(v0, b_p, acc0), mma_v2(v1, b_p, acc1)


@gluon.jit
def _clear_values(v_tile, i_tile, value_lo, value_hi, WINDOW: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Put zeros in place of a tile's values outside rows [value_lo, value_hi), in shared memory."""
    TILE: gl.constexpr = v_tile.shape[0]
    W: gl.constexpr = v_tile.shape[1]
    # Words of 32 bits, four a lane.
    words = v_tile._reinterpret(gl.int32, [TILE, W // 2], gl.NVMMASharedLayout(128, 32, 2))
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [256 // W, W // 8], [NUM_WARPS, 1], [1, 0])
    o_v = i_tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    m_v = o_v < value_hi
    if WINDOW:
        m_v = m_v & (o_v >= value_lo)
    b_v = words.load(layout)
    words.store(gl.where(gl.expand_dims(m_v, 1), b_v, 0))  # owned: values of a warpgroup


@gluon.jit
def _load_rows(
    v_words, table_ptr, row_0, row_end, S: gl.constexpr, W: gl.constexpr, V_ROW: gl.constexpr, PARTLY: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """V's rows [row_0, row_end), PARTLY at most, as words of two 16-bit values, and zeros to fill up: [PARTLY * W / 2]."""
    v_ptr, stride_v_p = v_words
    WORDS: gl.constexpr = PARTLY * W // 2
    # Each warp has all of 256 words, so that what is asked of them crosses no warp.
    o_w = gl.arange(0, WORDS, layout=gl.BlockedLayout([8 if WORDS >= 256 else 4], [32], [NUM_WARPS], [0]))
    o_row = row_0 + o_w // (W // 2)
    m_row = o_row < row_end
    page = gl.load(table_ptr + o_row // S, mask=m_row, other=0)
    o_v = page.to(gl.int64) * stride_v_p + o_row % S * (V_ROW // 2) + o_w % (W // 2)
    return gl.load(v_ptr + o_v, mask=m_row, other=0)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _holds_nan(b_v, FP8: gl.constexpr, BF16: gl.constexpr):
    """Whether words hold NaN, or of 16-bit values infinity, which 0 turns into NaN: a field of ones alone overflows into the place of the sign."""
    FIELD: gl.constexpr = 0x7F7F7F7F if FP8 else (0x7F807F80 if BF16 else 0x7C007C00)
    LOWEST: gl.constexpr = 0x01010101 if FP8 else (0x00800080 if BF16 else 0x04000400)
    SIGNS: gl.constexpr = -0x7F7F7F80 if FP8 else -0x7FFF8000
    return (gl.reduce((b_v & FIELD) + LOWEST, 0, _or) & SIGNS) != 0


@gluon.jit
def _add_row(
    acc0, acc1, b_weight, v_words, table_ptr, i_row, o_position, window,
    H: gl.constexpr, S: gl.constexpr, V_ROW: gl.constexpr, FP8: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, dtype: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """One row of V, from its page, times `b_weight` [M] added to the two halves of the sum, where query rows at positions `o_position` [M] see it."""
    m_seen = i_row <= o_position if CAUSAL else o_position == o_position  # owned: drafts
    if WINDOW:
        m_seen = m_seen & (i_row > o_position - window)  # owned: windows of drafts
    v_ptr, stride_v_p = v_words
    page = gl.load(table_ptr + i_row // S)
    first = v_ptr + (page.to(gl.int64) * stride_v_p + i_row % S * (V_ROW // 2))
    o_e = gl.arange(0, H, layout=gl.SliceLayout(1, mma))
    if FP8:
        o_v = first.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + 2 * o_e
        v0 = gl.load(o_v).to(gl.float32)
        v1 = gl.load(o_v + 1).to(gl.float32)
    else:
        o_v = first.to(gl.pointer_type(dtype), bitcast=True) + o_e
        v0 = gl.load(o_v).to(gl.float32)
        v1 = gl.load(o_v + H).to(gl.float32)
    m_seen = gl.expand_dims(m_seen, 0)
    b_weight = gl.expand_dims(b_weight, 0)
    return (
        gl.where(m_seen, acc0 + gl.expand_dims(v0, 1) * b_weight, acc0),
        gl.where(m_seen, acc1 + gl.expand_dims(v1, 1) * b_weight, acc1),
    )


@gluon.jit
def _add_lane_rows(b_p, WGMMA: gl.constexpr):
    """Rows r and r + 8 of each 16 of a tile, which a lane holds, added up, where registers are few: [TILE / 2, M]."""
    if WGMMA:
        return gl.sum(b_p.reshape([b_p.shape[0] // 16, 2, 8, b_p.shape[1]]), 1).reshape([b_p.shape[0] // 2, b_p.shape[1]])
    else:
        return b_p


@gluon.constexpr_function
def _groups_layout(num_groups, num_columns, num_warps):
    """[groups of 16 rows, columns] of which each thread holds all groups, of the columns that it has in a multiply's result."""
    columns = [[0, 1], *([0, 1 << i] for i in range(3, num_columns.bit_length() - 1))]
    groups = [[1 << i, 0] for i in range(num_groups.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(columns + groups, lanes, [[0, 0]] * (num_warps.bit_length() - 1), [], [num_groups, num_columns])


@gluon.jit
def _max_over_rows(b_s, tops, NUM_WARPS: gl.constexpr, WGMMA: gl.constexpr, mma: gl.constexpr):
    """A tile's maxima [M]: each warp's own first, which meet once, in shared memory [groups of 16 rows, M]."""
    GROUPS: gl.constexpr = b_s.shape[0] // 16
    M: gl.constexpr = b_s.shape[1]
    if WGMMA:
        # That memory would be what keeps a second program off the SM.
        return gl.max(b_s, 0)
    else:
        tops.store(gl.max(b_s.reshape([GROUPS, 16, M]), 1))
        b_top = gl.max(tops.load(_groups_layout(GROUPS, M, NUM_WARPS)), 0)
        return gl.convert_layout(b_top, gl.SliceLayout(0, mma), assert_trivial=True)


@gluon.jit
def _unit_of(scales):
    """A power of two near the largest of a tile's scales, a factor of two below at most, and its inverse: both exact."""
    top = gl.max(gl.abs(scales), 0)
    # One where all are zero or NaN or one is infinite: a row that others do not see must not decide how finely P is rounded for them.
    top = gl.where((top > 0.0) & (top < float("inf")), top, 1.0)
    # From 2^-60 to 2^126; of its bits those of the exponent.
    unit = gl.minimum(gl.maximum(top, 8.6736174e-19), 8.507059e37).to(gl.int32, bitcast=True) & 0x7F800000
    return unit.to(gl.float32, bitcast=True), (0x7F000000 - unit).to(gl.float32, bitcast=True)


@gluon.jit
def _attend_tile(
    acc0, acc1, p_sum, b_max, v_unit, b_s, q_scale, b_ks, b_vs, b_vs_all, soft_cap, k_tile, v_tile, v_bar, phase, tops, nan_seen, v_words,
    table_ptr, i_tile, row_lo, row_hi, common_lo, common_hi, position_0, window, first_m,
    FULL: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, V_ROW: gl.constexpr, FP8: gl.constexpr, PER_TOKEN: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, MULTI_QUERY: gl.constexpr, MASK_KV: gl.constexpr, NUM_WARPS: gl.constexpr,
    WGMMA: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """One online-softmax step over a tile's products `b_s` with q and its V in shared memory; every query row sees it in full (FULL) or by its own mask."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    M: gl.constexpr = q_scale.shape[0]
    H: gl.constexpr = acc0.shape[0]
    value_lo = row_lo
    value_hi = row_hi
    if not FULL and MULTI_QUERY and MASK_KV:
        # A row that one query token sees may hold NaN, and another that does not see it must not meet it: 0 * NaN. Then such rows are added by themselves.
        value_lo = gl.where(nan_seen, common_lo, row_lo)
        value_hi = gl.where(nan_seen, common_hi, row_hi)
    # While the products are on their way, V is read, which 16 bits a value have no registers for, or cleared.
    READ_EARLY: gl.constexpr = WGMMA and FP8 and FULL
    WAIT_EARLY: gl.constexpr = READ_EARLY or (WGMMA and not FULL)
    if WAIT_EARLY:
        mbarrier.wait(v_bar, phase)
    if READ_EARLY:
        v0, v1 = _read_values(v_tile, H, FP8, a_layout)
    if WGMMA:
        if not FULL and MASK_KV:
            _clear_values(v_tile, i_tile, value_lo, value_hi, WINDOW, NUM_WARPS)
        b_s = warpgroup_mma_wait(0, [b_s])
    b_s = b_s * gl.expand_dims(q_scale, 0)
    if PER_TOKEN:
        if not WGMMA:
            # While the products are on their way; where a warpgroup multiplies, there are no registers to keep it in.
            unit, per_unit = _unit_of(b_vs_all)
        b_s = b_s * gl.expand_dims(b_ks, 1)
    if SOFT_CAP:
        # cap * tanh(s / cap) as 2 * sigmoid(2 s / cap) - 1, which keeps NaN and saturates at both ends; scores are in base 2 already
        b_s = soft_cap * LOG2_E * (2.0 / (1.0 + gl.exp2(b_s * (-2.0 / soft_cap))) - 1.0)
    if not FULL:
        o_row = i_tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, mma))
        o_t = (first_m + gl.arange(0, M, layout=gl.SliceLayout(0, mma))) // GROUP
        m_seen = gl.expand_dims(o_row < row_hi, 1)
        if CAUSAL and MULTI_QUERY:
            m_seen = m_seen & (gl.expand_dims(o_row, 1) <= gl.expand_dims(position_0 + o_t, 0))
        if WINDOW:
            m_seen = m_seen & (gl.expand_dims(o_row, 1) > gl.expand_dims(position_0 + o_t - window, 0))
        # -inf, not a large finite number: a row that sees nothing must get probability 0, not 1
        b_s = gl.where(m_seen, b_s, float("-inf"))  # owned: scores

    # gl.max drops NaN, but exp2(NaN - top) does not: a NaN score reaches the sum and the output
    b_top = gl.maximum(b_max, _max_over_rows(b_s, tops, NUM_WARPS, WGMMA, mma))
    b_shift = b_top
    if not FULL:
        b_shift = gl.where(b_top == float("-inf"), 0.0, b_top)
    b_decay = gl.exp2(b_max - b_shift)
    b_p = gl.exp2(b_s - gl.expand_dims(b_shift, 0))
    # Summed over the rows of a lane's own, and over lanes and warps once at the end.
    sums: gl.constexpr = gl.SliceLayout(0, p_sum.type.layout)
    p_sum = p_sum * gl.expand_dims(gl.convert_layout(b_decay, sums, assert_trivial=True), 0) + _add_lane_rows(b_p, WGMMA)
    if not WAIT_EARLY:
        # The maximum above has been a meeting of all warps, and spares one that the compiler would put between the copies' start and this.
        mbarrier.wait(v_bar, phase)
    if PER_TOKEN:
        # P times the scale relative to the tile's largest keeps P within fp16, whatever the scales; the values are kept in units of the last tile's.
        if WGMMA:
            unit, per_unit = _unit_of(b_vs_all)
        b_p = b_p * gl.expand_dims(b_vs * per_unit, 1)
        if not FULL and MASK_KV:
            b_p = gl.where(m_seen, b_p, 0.0)  # owned: seen scales
        b_decay = b_decay * (v_unit * per_unit)
        v_unit = unit
    acc0 = acc0 * gl.expand_dims(b_decay, 0)
    acc1 = acc1 * gl.expand_dims(b_decay, 0)
    b_p = b_p.to(gl.float16 if FP8 else v_tile.dtype)
    if WGMMA:
        # P takes the place of K, which every warp is past: the maximum above was taken over all of them.
        p_smem = k_tile._reinterpret(b_p.dtype, [TILE, M], gl.NVMMASharedLayout(min(128, 2 * M), 16, 2))
        p_smem.store(b_p)
        fence_async_shared()
        b_p = p_smem
    else:
        b_p = gl.convert_layout(b_p, b_layout)
    if FULL or WGMMA:
        if not READ_EARLY:
            v0, v1 = _read_values(v_tile, H, FP8, a_layout)
        acc0, acc1 = _multiply_values(v0, v1, b_p, acc0, acc1, FP8, WGMMA)
    else:
        ones = _ones_before(value_hi, i_tile, TILE, gl.SliceLayout(0, a_layout))
        if WINDOW:
            ones = ones & ~_ones_before(value_lo, i_tile, TILE, gl.SliceLayout(0, a_layout))
        v0, v1 = _load_masked_values(v_tile, ones, H, FP8, MASK_KV, a_layout)
        acc0, acc1 = mma_v2(v0, b_p, acc0), mma_v2(v1, b_p, acc1)
    if not FULL and MULTI_QUERY and MASK_KV:
        if nan_seen:
            weights = p_smem.load(mma) if WGMMA else gl.convert_layout(b_p, mma)
            for i_row in range(gl.maximum(i_tile * TILE, row_lo), gl.minimum(i_tile * TILE + TILE, row_hi)):
                if (i_row < value_lo) | (i_row >= value_hi):
                    b_weight = gl.sum(gl.where(gl.expand_dims(o_row == i_row, 1), weights.to(gl.float32), 0.0), 0)
                    acc0, acc1 = _add_row(
                        acc0, acc1, b_weight, v_words, table_ptr, i_row, position_0 + o_t, window,
                        H, S, V_ROW, FP8, CAUSAL, WINDOW, v_tile.dtype, mma,
                    )  # fmt: skip
    return acc0, acc1, p_sum, b_top, v_unit


@gluon.jit
def _load_query(
    q_ptr, sm_scale, i_b, i_h, first_m, query_len, stride_q_b, stride_q_t, stride_q_h,
    GROUP: gl.constexpr, M: gl.constexpr, H: gl.constexpr, FP8: gl.constexpr, NUM_WARPS: gl.constexpr, WGMMA: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """M query rows of one KV head, from `first_m` on, as two operands, in the order that `_load_keys` gives K, and the factor of their scores (base 2).

    The operands are registers, or with WGMMA shared memory [M, H].
    """
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    o_m = first_m + gl.arange(0, M, layout=gl.SliceLayout(1, q_layout))
    o_q = i_b.to(gl.int64) * stride_q_b + (o_m // GROUP) * stride_q_t + (i_h * GROUP + o_m % GROUP) * stride_q_h
    m_q = gl.expand_dims(o_m < query_len * GROUP, 1)
    row_scale = gl.full([M], 1.0, gl.float32, gl.SliceLayout(1, q_layout))
    if FP8:
        o_d = gl.arange(0, 2 * H, layout=gl.SliceLayout(0, q_layout))
        b_q = gl.load(q_ptr + (gl.expand_dims(o_q, 1) + gl.expand_dims(o_d, 0)), mask=m_q, other=0.0).to(gl.float32)
        # fp16 holds e4m3 exactly; a power of two brings each row of q into its range.
        exponent = gl.ceil(gl.log2(gl.max(gl.abs(b_q), 1)))
        exponent = gl.where(gl.abs(exponent) < 126.0, exponent, 0.0)
        row_scale = gl.exp2(exponent)
        b_q = (b_q * gl.expand_dims(gl.exp2(-exponent), 1)).to(gl.float16)
        # Each second pair of neighbours.
        q0, q1 = b_q.reshape([M, H // 2, 2, 2]).permute((0, 1, 3, 2)).split()
        q0 = q0.reshape([M, H])
        q1 = q1.reshape([M, H])
    else:
        o_e = gl.arange(0, H, layout=gl.SliceLayout(0, q_layout))
        o_q = gl.expand_dims(o_q, 1) + gl.expand_dims(o_e, 0)
        q0 = gl.load(q_ptr + o_q, mask=m_q, other=0.0)
        q1 = gl.load(q_ptr + o_q + H, mask=m_q, other=0.0)
    q_scale = gl.convert_layout(row_scale * (sm_scale * LOG2_E), gl.SliceLayout(0, mma))
    if WGMMA:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        q0 = gl.allocate_shared_memory(q0.dtype, [M, H], layout, q0)
        q1 = gl.allocate_shared_memory(q1.dtype, [M, H], layout, q1)
        fence_async_shared()
        program_barrier()
        return q0, q1, q_scale
    else:
        return gl.convert_layout(q0.permute((1, 0)), b_layout), gl.convert_layout(q1.permute((1, 0)), b_layout), q_scale


@gluon.jit
def _owned_tiles(row_hi, query_len, window, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """A sequence's first owned row, and the tiles [first, last) that hold one."""
    row_lo = gl.maximum(row_hi - query_len - window + 1, 0) if WINDOW else row_hi * 0
    first_tile = row_lo // TILE
    last_tile = (row_hi + TILE - 1) // TILE
    return row_lo, first_tile, last_tile


@gluon.jit
def _common_rows(row_hi, query_len, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Rows [common_lo, common_hi) are seen by every query row."""
    common_lo = gl.maximum(row_hi - window, 0) if WINDOW else row_hi * 0
    common_hi = gl.maximum(row_hi - query_len + 1, 0) if CAUSAL else row_hi
    return common_lo, common_hi


@gluon.jit
def _partly_seen_values(
    v_words, table_ptr, tile_lo, tile_hi, row_lo, row_hi, query_len, window,
    TILE: gl.constexpr, S: gl.constexpr, W: gl.constexpr, V_ROW: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PARTLY: gl.constexpr,
    MASK_KV: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """V's rows in tiles [tile_lo, tile_hi) that some query rows see and some do not, right and left of the common ones, PARTLY of either at most.

    Nothing where there are none, or without the mask.
    """
    if PARTLY and MASK_KV:
        common_lo, common_hi = _common_rows(row_hi, query_len, window, CAUSAL, WINDOW)
        lo = tile_lo * TILE
        hi = tile_hi * TILE
        right = _load_rows(v_words, table_ptr, gl.maximum(common_hi, lo), gl.minimum(row_hi, hi), S, W, V_ROW, PARTLY, NUM_WARPS)
        left = right
        if WINDOW:
            left = _load_rows(v_words, table_ptr, gl.maximum(row_lo, lo), gl.minimum(common_lo, hi), S, W, V_ROW, PARTLY, NUM_WARPS)
        return right, left
    else:
        return 0, 0


@gluon.jit
def _attend_tiles(
    ring, head, i_slot, phase, right, left, table_ptr, q0, q1, q_scale, soft_cap, first_m, tile_lo, tile_hi, row_lo, row_hi, window, query_len,
    GROUP: gl.constexpr, M: gl.constexpr, H: gl.constexpr, W: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr,
    FP8: gl.constexpr, PER_TOKEN: gl.constexpr, SCALES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    MULTI_QUERY: gl.constexpr, MASK_KV: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, WGMMA: gl.constexpr, BULK: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Online softmax over tiles [tile_lo, tile_hi), whose first copies are on their way into the slots from `i_slot` on.

    `right` and `left` are V's partly seen rows (MULTI_QUERY and MASK_KV). Returns the two halves of the sum of values [H, M], the sums of probabilities by row
    of a tile, the maxima [M], the unit of the values, and the next slot and its phase.
    """
    k_smem, v_smem, k_bars, v_bars, k_scales, v_scales = ring
    _, v_desc, _, _, v_words, k_scale_words, v_scale_words = head
    # Tiles [full_lo, full_hi) hold rows that every query row sees and nothing else: they need no mask.
    common_lo, common_hi = _common_rows(row_hi, query_len, window, CAUSAL, WINDOW)
    full_lo = gl.minimum(gl.maximum((common_lo + TILE - 1) // TILE, tile_lo), gl.maximum(tile_hi, tile_lo))  # owned: left edge
    full_hi = gl.maximum(gl.minimum(common_hi // TILE, tile_hi), full_lo)  # owned: right edge
    position_0 = row_hi - query_len
    nan_seen = False
    if MULTI_QUERY and MASK_KV:
        BF16: gl.constexpr = v_desc.dtype == gl.bfloat16
        nan_seen = _holds_nan(right, FP8, BF16)  # owned: seen values
        if WINDOW:
            nan_seen = nan_seen | _holds_nan(left, FP8, BF16)  # owned: seen values left of a window

    lanes: gl.constexpr = lane_layout(TILE, S, W, NUM_WARPS)
    # Each warp holds every row of a tile, so that a maximum over them crosses no warp.
    all_layout: gl.constexpr = gl.BlockedLayout([TILE // 32], [32], [NUM_WARPS], [0])
    o_n = gl.arange(0, TILE, layout=gl.SliceLayout(1, mma))
    o_all = gl.arange(0, TILE, layout=all_layout)
    # Scales that do not come with their tile are loaded a tile ahead.
    APART: gl.constexpr = PER_TOKEN and not SCALES
    b_ks = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, mma))
    b_vs = b_ks
    b_vs_all = gl.zeros([TILE], gl.float32, all_layout)
    if APART:
        rows = _scale_rows(table_ptr, tile_lo, tile_hi, row_lo, row_hi, o_n, TILE, S, WINDOW)
        all_rows = _scale_rows(table_ptr, tile_lo, tile_hi, row_lo, row_hi, o_all, TILE, S, WINDOW)
        b_ks = _load_scales(k_scale_words, rows, tile_lo < tile_hi, S)
        b_vs = _load_scales(v_scale_words, rows, tile_lo < tile_hi, S)
        b_vs_all = _load_scales(v_scale_words, all_rows, tile_lo < tile_hi, S)
    tops = 0
    if not WGMMA:
        # Apart from what other exchanges take, which would have to wait for it.
        tops = gl.allocate_shared_memory(gl.float32, [TILE // 16, M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    acc0 = gl.zeros([H, M], gl.float32, mma)
    acc1 = gl.zeros([H, M], gl.float32, mma)
    p_sum = _add_lane_rows(gl.zeros([TILE, M], gl.float32, mma), WGMMA)
    b_max = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    v_unit = 0.0
    for PART in gl.static_range(3):
        # Edge tiles on the left (of a window alone), full tiles, edge tiles on the right.
        if PART != 0 or WINDOW:
            part_lo = tile_lo if PART == 0 else (full_lo if PART == 1 else full_hi)
            part_hi = full_lo if PART == 0 else (full_hi if PART == 1 else tile_hi)
            for i_tile in range(part_lo, part_hi):
                if APART:
                    rows = _scale_rows(table_ptr, i_tile + 1, tile_hi, row_lo, row_hi, o_n, TILE, S, WINDOW)
                    all_rows = _scale_rows(table_ptr, i_tile + 1, tile_hi, row_lo, row_hi, o_all, TILE, S, WINDOW)
                i_next = i_tile + STAGES - 1
                if PART != 2:
                    pages = _pages_of_tile(table_ptr, i_next, tile_hi, row_lo, row_hi, TILE, S, WINDOW, BULK, lanes)
                    scale_rows = _copied_scale_rows(table_ptr, i_next, tile_hi, row_lo, row_hi, TILE, S, SCALES, WINDOW, lanes)
                k_tile = k_smem.index(i_slot).reshape([TILE, W])
                mbarrier.wait(k_bars.index(i_slot), phase)
                if SCALES:
                    b_ks = k_scales.index(i_slot).load(gl.SliceLayout(1, mma))
                    b_vs = v_scales.index(i_slot).load(gl.SliceLayout(1, mma))
                    b_vs_all = v_scales.index(i_slot).load(all_layout)
                # The masks of the edges take registers, as scales of tokens do and 16 bits a value.
                BOTH: gl.constexpr = PART == 1 or (FP8 and not PER_TOKEN)
                b_s = _multiply_keys(k_tile, q0, q1, BOTH, M, H, TILE, FP8, WGMMA, mma)
                if PART != 2:
                    # Every warp is past its reads of the tile before: its place can be filled, while the products above are on their way.
                    program_barrier()
                    free = gl.where(i_slot == 0, STAGES - 1, i_slot - 1)
                    _copy_tile(ring, head, free, pages, scale_rows, i_next, tile_hi, TILE, S, K_ROW, V_ROW, SCALES, BULK, lanes)
                if APART:
                    next_ks = _load_scales(k_scale_words, rows, i_tile + 1 < tile_hi, S)
                    next_vs = _load_scales(v_scale_words, rows, i_tile + 1 < tile_hi, S)
                    next_vs_all = _load_scales(v_scale_words, all_rows, i_tile + 1 < tile_hi, S)
                acc0, acc1, p_sum, b_max, v_unit = _attend_tile(
                    acc0, acc1, p_sum, b_max, v_unit, b_s, q_scale, b_ks, b_vs, b_vs_all, soft_cap, k_tile,
                    v_smem.index(i_slot).reshape([TILE, W]), v_bars.index(i_slot), phase, tops, nan_seen, v_words, table_ptr, i_tile, row_lo, row_hi,
                    common_lo, common_hi, position_0, window, first_m, PART == 1, GROUP, TILE, S, V_ROW, FP8, PER_TOKEN, CAUSAL, WINDOW, SOFT_CAP,
                    MULTI_QUERY, MASK_KV, NUM_WARPS, WGMMA, mma,
                )  # fmt: skip
                if APART:
                    b_ks = next_ks
                    b_vs = next_vs
                    b_vs_all = next_vs_all
                i_slot += 1
                phase = gl.where(i_slot == STAGES, phase ^ 1, phase)
                i_slot = gl.where(i_slot == STAGES, 0, i_slot)
    return acc0, acc1, p_sum, b_max, v_unit, i_slot, phase


@gluon.jit
def _value_scale(v_scale_ptr, v_unit, FP8: gl.constexpr, PER_TOKEN: gl.constexpr):
    """What the summed values are in units of."""
    if PER_TOKEN:
        return v_unit
    elif FP8:
        return gl.load(v_scale_ptr)
    else:
        return 1.0


@gluon.jit
def _write_output(
    out_ptr, lse_ptr, sinks_ptr, acc0, acc1, b_sum, b_max, v_scale, i_b, i_h, first_m, query_len, stride_out_b, stride_out_t, stride_out_h,
    stride_lse_b, stride_lse_t, stride_lse_h, GROUP: gl.constexpr, M: gl.constexpr, H: gl.constexpr, FP8: gl.constexpr, SINKS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Normalize one KV head's values [H, M] twice, in units of `v_scale`, with their sums and maxima [M], and store them as its query rows."""
    o_m = first_m + gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    m_m = o_m < query_len * GROUP
    o_h = i_h * GROUP + o_m % GROUP
    if SINKS:
        # One more key with value zero; a row that saw no key stays empty.
        b_sink = gl.load(sinks_ptr + o_h, mask=m_m, other=0.0) * LOG2_E
        b_top = gl.maximum(b_max, b_sink)
        b_decay = gl.exp2(b_max - b_top)
        b_sum = gl.where(b_sum == 0.0, 0.0, b_sum * b_decay + gl.exp2(b_sink - b_top))
        b_max = b_top
        v_scale = v_scale * b_decay
    factor, b_lse = _close(b_sum, b_max, v_scale)
    o_out = out_ptr + i_b.to(gl.int64) * stride_out_b + (o_m // GROUP) * stride_out_t + o_h * stride_out_h
    o_lse = i_b.to(gl.int64) * stride_lse_b + (o_m // GROUP) * stride_lse_t + o_h * stride_lse_h
    gl.store(lse_ptr + o_lse, b_lse * LN_2, mask=m_m)
    _store_halves(o_out, acc0, acc1, factor, m_m, H, FP8, False, mma)


@gluon.jit
def _close(b_sum, b_max, v_scale):
    """What the values are to be multiplied by, and the log-sum-exp, base 2; 0 and -inf where a row saw no key."""
    empty = b_sum == 0.0
    return gl.where(empty, 0.0, v_scale / gl.where(empty, 1.0, b_sum)), gl.where(empty, float("-inf"), b_max + gl.log2(b_sum))


@gluon.jit
def _store_halves(o_out, acc0, acc1, factor, m_m, H: gl.constexpr, FP8: gl.constexpr, PAIRS: gl.constexpr, mma: gl.constexpr):
    """Rows of D values at pointers `o_out` [M], of fp32 and on 8 bytes if PAIRS: row e of the two halves is d 2e and 2e + 1, or not FP8 e and H + e."""
    m_out = gl.expand_dims(m_m, 0)
    factor = gl.expand_dims(factor, 0)
    o_e = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, mma)), 1)
    acc0 = (acc0 * factor).to(o_out.dtype.element_ty)
    acc1 = (acc1 * factor).to(o_out.dtype.element_ty)
    if FP8 and PAIRS:
        # Two neighbours at a time.
        pair = (acc0.to(gl.uint32, bitcast=True).to(gl.int64)) | (acc1.to(gl.uint32, bitcast=True).to(gl.int64) << 32)
        gl.store(gl.expand_dims(o_out.to(gl.pointer_type(gl.int64), bitcast=True), 0) + o_e, pair, mask=m_out)
    else:
        o_out = gl.expand_dims(o_out, 0) + (2 if FP8 else 1) * o_e
        gl.store(o_out, acc0, mask=m_out)
        gl.store(o_out + (1 if FP8 else H), acc1, mask=m_out)


@gluon.jit
def _splits(first_tile, last_tile, num_splits, tiles_per_split):
    """How many tiles a split takes, by the rule of `owned_tiles` in combine.py."""
    per_split = gl.maximum((last_tile - first_tile + num_splits - 1) // num_splits, 1)
    return gl.where(tiles_per_split > 0, tiles_per_split, per_split)


@gluon.jit
def _prefetch_rows(first, num_bytes):
    """Have L2 fetch `num_bytes`, a multiple of 16, from the address `first` on; 0 for none."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2; }",
        "=r,l,r",
        [first.to(gl.int64), num_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch_first_tile(
    k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, num_pages, seq_lens_ptr, page_table_ptr, stride_table_b, num_lanes, i_b, i_h, i_s,
    num_splits, tiles_per_split, query_len, window,
    W: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr, WHOLE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Have L2 fetch a program's first tile of K and V while the kernel before may still run.

    The length and the pages that are read here may be about to change. They choose what is fetched, within the cache's bounds, and nothing else: both are read
    anew after the wait, and past this multiprocessor's own cache here, where they would stay.
    """
    ROWS: gl.constexpr = S if S < TILE else TILE
    # A lane for each stretch of rows in one page.
    o_c = gl.arange(0, 32 * NUM_WARPS, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    if WHOLE:
        o_row = o_c * ROWS
        owned = True
    else:
        row_hi = gl.load(seq_lens_ptr + i_b, cache_modifier=".cg")
        row_lo, first_tile, last_tile = _owned_tiles(row_hi, query_len, window, TILE, WINDOW)
        tile_lo = first_tile + i_s * _splits(first_tile, last_tile, num_splits, tiles_per_split)
        o_row = tile_lo * TILE + o_c * ROWS
        owned = (o_row >= 0) & (o_row < row_hi)
        if WINDOW:
            owned = owned & (o_row + ROWS > row_lo)
    wanted = owned & (o_c < TILE // ROWS) & (o_row // S < num_lanes)
    page = gl.load(page_table_ptr + i_b.to(gl.int64) * stride_table_b + o_row // S, mask=wanted, other=0, cache_modifier=".cg")
    num_bytes = gl.where(wanted & (page >= 0) & (page < num_pages), ROWS * 2 * W, 0)
    o_slot = o_row % S * (W // 2)
    _prefetch_rows(k_ptr + (page.to(gl.int64) * stride_k_p + i_h.to(gl.int64) * stride_k_h + o_slot), num_bytes)
    _prefetch_rows(v_ptr + (page.to(gl.int64) * stride_v_p + i_h.to(gl.int64) * stride_v_h + o_slot), num_bytes)


@gluon.jit(do_not_specialize=["window", "query_len", "num_splits", "tiles_per_split", "num_pages", "num_lanes", "stride_table_b"])
def decode_hopper_kernel(
    out_ptr,  # [B, QL, HQ, D]
    lse_ptr,  # [B, QL, HQ] fp32, natural
    partial_o_ptr,  # [B, HKV, NS, QL * G, D] fp32, written if SPLIT
    partial_lse_ptr,  # [B, HKV, NS, QL * G] fp32, base 2
    q_ptr,  # [B, QL, HQ, D]
    k_desc,  # [P, HKV, S, D], FP8: [P, HKV, S, D / 2] int16; boxes of one page and head
    v_desc,
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
    k_ptr,  # what k_desc and v_desc describe, as int32 words, which the strides count; with PREFETCH the rows of a page and head lie one after another
    v_ptr,
    num_pages,
    num_lanes,  # MP
    stride_k_p,
    stride_k_h,
    stride_v_p,
    stride_v_h,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_out_b,
    stride_out_t,
    stride_out_h,
    stride_lse_b,
    stride_lse_t,
    stride_lse_h,
    stride_ks_p,
    stride_ks_h,
    stride_ks_s,
    stride_vs_p,
    stride_vs_h,
    stride_vs_s,
    stride_table_b,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    S: gl.constexpr,
    K_ROW: gl.constexpr,  # from a row of K to the next, in 16-bit elements
    V_ROW: gl.constexpr,
    SPLIT: gl.constexpr,
    FP8: gl.constexpr,
    PER_TOKEN: gl.constexpr,
    SCALES: gl.constexpr,  # scales of tokens come into shared memory with their tile; else into registers
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    PARTLY: gl.constexpr,  # rows that only some query tokens see, at either edge: a power of two or 0
    MASK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    WGMMA: gl.constexpr,
    BULK: gl.constexpr,  # copies by TMA, page by page; else lane by lane
    ALONE: gl.constexpr,  # two programs must not share a multiprocessor
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    # At most two tiles are left when the full ones are done, and no copy is started for them any more.
    gl.static_assert(STAGES >= 3)
    H: gl.constexpr = D // 2
    # 16-bit elements of a row of K and V.
    W: gl.constexpr = H if FP8 else D
    # Each warp takes 16 rows of K, or of V transposed, and all query rows.
    mma: gl.constexpr = gl.NVMMADistributedLayout([3 if WGMMA else 2, 0], [NUM_WARPS, 1], [16, M, 16] if WGMMA else [16, 8])
    # A program begins with its sequence's first row, whatever the length.
    WHOLE: gl.constexpr = not SPLIT and not WINDOW
    i_h = gl.program_id(0) // ROW_BLOCKS
    first_m = gl.program_id(0) % ROW_BLOCKS * M
    i_b = gl.program_id(1)
    i_s = gl.program_id(2)
    ring = _make_ring(k_desc, v_desc, TILE, W, SCALES, STAGES, NUM_WARPS, BULK, ALONE)
    if PREFETCH:
        _prefetch_first_tile(
            k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, num_pages, seq_lens_ptr, page_table_ptr, stride_table_b, num_lanes, i_b, i_h, i_s,
            num_splits, tiles_per_split, query_len, window, W, TILE, S, WINDOW, WHOLE, NUM_WARPS,
        )  # fmt: skip
    if PDL:
        # Every byte read below was written by an earlier kernel of this stream; wait for it, then let combine be set up while this one runs.
        i_s = _dependent_launch(i_s)
    row_hi = gl.load(seq_lens_ptr + i_b)

    # Rows [row_lo, row_hi) are owned; tiles that hold one are shared out over the splits.
    row_lo, first_tile, last_tile = _owned_tiles(row_hi, query_len, window, TILE, WINDOW)
    tile_lo = first_tile
    tile_hi = last_tile
    is_used = True
    if SPLIT:
        per_split = _splits(first_tile, last_tile, num_splits, tiles_per_split)
        tile_lo = first_tile + i_s * per_split
        tile_hi = gl.minimum(tile_lo + per_split, last_tile)
        is_used = (tile_lo < last_tile) | (i_s == 0)
    if is_used:
        table_ptr = page_table_ptr + i_b.to(gl.int64) * stride_table_b
        head = _head(
            k_desc, v_desc, i_h, k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, k_scale_ptr, v_scale_ptr,
            stride_ks_p, stride_ks_h, stride_ks_s, stride_vs_p, stride_vs_h, stride_vs_s, PER_TOKEN,
        )  # fmt: skip
        i_slot = 0
        phase = 0
        _first_copies(
            ring, head, i_slot, table_ptr, num_lanes, tile_lo, tile_hi, row_lo, row_hi, TILE, S, K_ROW, V_ROW, SCALES, WINDOW, STAGES, BULK, WHOLE,
            lane_layout(TILE, S, W, NUM_WARPS),
        )  # fmt: skip
        _, _, _, _, v_words, _, _ = head
        right, left = _partly_seen_values(
            v_words, table_ptr, tile_lo, tile_hi, row_lo, row_hi, query_len, window, TILE, S, W, V_ROW, CAUSAL, WINDOW, PARTLY, MASK_KV,
            NUM_WARPS,
        )  # fmt: skip
        q0, q1, q_scale = _load_query(
            q_ptr, sm_scale, i_b, i_h, first_m, query_len, stride_q_b, stride_q_t, stride_q_h, GROUP, M, H, FP8, NUM_WARPS, WGMMA, mma
        )  # fmt: skip
        if FP8 and not PER_TOKEN:
            q_scale = q_scale * gl.load(k_scale_ptr)
        acc0, acc1, p_sum, b_max, v_unit, _, _ = _attend_tiles(
            ring, head, i_slot, phase, right, left, table_ptr, q0, q1, q_scale, soft_cap, first_m, tile_lo, tile_hi, row_lo, row_hi, window, query_len,
            GROUP, M, H, W, TILE, S, K_ROW, V_ROW, FP8, PER_TOKEN, SCALES, CAUSAL, WINDOW, SOFT_CAP, PARTLY > 0, MASK_KV, STAGES, NUM_WARPS, WGMMA, BULK,
            mma,
        )  # fmt: skip

        v_scale = _value_scale(v_scale_ptr, v_unit, FP8, PER_TOKEN)
        b_sum = gl.convert_layout(gl.sum(p_sum, 0), gl.SliceLayout(0, mma))
        if SPLIT:
            o_m = first_m + gl.arange(0, M, layout=gl.SliceLayout(0, mma))
            m_m = o_m < query_len * GROUP
            factor, b_lse = _close(b_sum, b_max, v_scale)
            o_state = ((i_b.to(gl.int64) * (gl.num_programs(0) // ROW_BLOCKS) + i_h) * num_splits + i_s) * (query_len * GROUP) + o_m
            gl.store(partial_lse_ptr + o_state, b_lse, mask=m_m)
            _store_halves(partial_o_ptr + o_state * D, acc0, acc1, factor, m_m, H, FP8, True, mma)
        else:
            _write_output(
                out_ptr, lse_ptr, sinks_ptr, acc0, acc1, b_sum, b_max, v_scale, i_b, i_h, first_m, query_len, stride_out_b, stride_out_t, stride_out_h,
                stride_lse_b, stride_lse_t, stride_lse_h, GROUP, M, H, FP8, SINKS, mma,
            )  # fmt: skip
