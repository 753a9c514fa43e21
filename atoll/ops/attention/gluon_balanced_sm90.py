"""The Hopper kernel in one launch: as many programs as the device runs at a time share out the tiles of the whole batch evenly, and merge among themselves.

All sequences' tiles lie in one line, KV heads within a sequence, and every program takes a stretch of equal length: a segment of each sequence and head that it
meets. A segment that is a whole sequence is written as output. Of one that was cut, every program leaves its part in the workspace and counts itself; who
comes last adds the parts up, in the order of the programs, whoever it is, and sets the count back to 0. Many parts are added up in groups first, and the
last group adds up the groups. While a segment is closed, the next one's copies are on their way.

Sources: work in one line cut evenly is "Stream-K" of Osama et al. (2023) for matrix products; the count of arrivals is that of the threadfence reduction in
NVIDIA's CUDA samples.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from atoll.ops.attention.gluon_copies_sm90 import _first_copies, _head, _make_ring, lane_layout, program_barrier
from atoll.ops.attention.gluon_kernel_sm90 import (
    _attend_tiles,
    _close,
    _dependent_launch,
    _load_query,
    _owned_tiles,
    _partly_seen_values,
    _value_scale,
    _write_output,
)

# Parts of a sequence that are read at a time while they are added up, and parts of a group.
PARTS = gl.constexpr(4)
GROUP_PARTS = gl.constexpr(8)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _line_length(row_hi, query_len, window, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """What a sequence and KV head take of the line: its tiles, and 1 where it has none, since its output is to be written."""
    _row_lo, first_tile, last_tile = _owned_tiles(row_hi, query_len, window, TILE, WINDOW)
    return gl.maximum(last_tile - first_tile, 1)


@gluon.jit
def _part_of(i_p, share, pair_lo):
    """Where program `i_p` leaves its part of the pair that begins at `pair_lo`: its first segment in place 0, one that begins within its stretch in place 1."""
    return 2 * i_p + gl.where(pair_lo > i_p * share, 1, 0)


@gluon.jit
def _write_part(partial_o_ptr, partial_lse_ptr, part, acc0, acc1, b_sum, b_max, v_scale, M: gl.constexpr, H: gl.constexpr, mma: gl.constexpr):
    """Leave a state in the workspace, and see that all threads have before one counts it."""
    factor, b_lse = _close(b_sum, b_max, v_scale)
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    o_e = gl.arange(0, H, layout=gl.SliceLayout(1, mma))
    o_part = partial_o_ptr + part.to(gl.int64) * (2 * H * M) + (gl.expand_dims(o_e * M, 1) + gl.expand_dims(o_m, 0))
    gl.store(partial_lse_ptr + part * M + o_m, b_lse)
    gl.store(o_part, acc0 * gl.expand_dims(factor, 0))
    gl.store(o_part + H * M, acc1 * gl.expand_dims(factor, 0))
    program_barrier()


@gluon.jit
def _is_last(arrivals_ptr, others):
    """Count this program; whether `others` had come before. What each wrote before it was counted is then there to be read, and the count is 0 again."""
    last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == others
    gl.store(arrivals_ptr, 0, mask=last)
    return last


@gluon.jit
def _merge_parts(
    partial_o_ptr, partial_lse_ptr, first, last, stride, share, pair_lo, M: gl.constexpr, H: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """Add up the parts of programs first, first + stride, ... up to last, in their order: two halves of values, and their sums and maxima (base 2)."""
    o_m = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    o_e = gl.arange(0, H, layout=gl.SliceLayout(1, mma))
    o_half = gl.expand_dims(o_e * M, 1) + gl.expand_dims(o_m, 0)
    acc0 = gl.zeros([H, M], gl.float32, mma)
    acc1 = gl.zeros([H, M], gl.float32, mma)
    b_sum = gl.zeros([M], gl.float32, gl.SliceLayout(0, mma))
    b_max = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    for i_first in range(first, last + 1, PARTS * stride):
        # No load waits for another. They read past this multiprocessor's own cache, since others wrote.
        b_top = b_max
        for j in gl.static_range(PARTS):
            there = i_first + j * stride <= last
            part = _part_of(i_first + j * stride, share, pair_lo)
            b_top = gl.maximum(b_top, gl.load(partial_lse_ptr + part * M + o_m, mask=there, other=float("-inf"), cache_modifier=".cg"))
        b_shift = gl.where(b_top == float("-inf"), 0.0, b_top)
        b_decay = gl.exp2(b_max - b_shift)
        b_sum = b_sum * b_decay
        acc0 = acc0 * gl.expand_dims(b_decay, 0)
        acc1 = acc1 * gl.expand_dims(b_decay, 0)
        b_max = b_top
        for j in gl.static_range(PARTS):
            there = i_first + j * stride <= last  # owned: parts
            part = _part_of(i_first + j * stride, share, pair_lo)
            b_weight = gl.exp2(gl.load(partial_lse_ptr + part * M + o_m, mask=there, other=float("-inf"), cache_modifier=".cg") - b_shift)
            o_part = partial_o_ptr + part.to(gl.int64) * (2 * H * M) + o_half
            b_sum += b_weight
            acc0 += gl.expand_dims(b_weight, 0) * gl.load(o_part, mask=there, other=0.0, cache_modifier=".cg")
            acc1 += gl.expand_dims(b_weight, 0) * gl.load(o_part + H * M, mask=there, other=0.0, cache_modifier=".cg")
    return acc0, acc1, b_sum, b_max


@gluon.jit(do_not_specialize=["window", "query_len", "batch", "num_kv_heads", "stride_table_b"])
def decode_balanced_kernel(
    out_ptr,  # [B, QL, HQ, D]
    lse_ptr,  # [B, QL, HQ] fp32, natural
    partial_o_ptr,  # [NP, 2, 2, D / 2, M] fp32, written: the two halves that the multiply gives
    partial_lse_ptr,  # [NP, 2, M] fp32, base 2
    arrivals_ptr,  # [2, NP, 2] int32, 0 before and after: of a group's parts, where its first is, and of a sequence's groups, where its first is
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
    batch,
    num_kv_heads,
    k_ptr,  # what k_desc and v_desc describe, as int32 words, which the strides count
    v_ptr,
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
    BATCH: gl.constexpr,  # batch or more, a power of two
    GROUP: gl.constexpr,
    M: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    S: gl.constexpr,
    K_ROW: gl.constexpr,
    V_ROW: gl.constexpr,
    FP8: gl.constexpr,
    PER_TOKEN: gl.constexpr,
    SCALES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    PARTLY: gl.constexpr,
    MASK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    WGMMA: gl.constexpr,
    BULK: gl.constexpr,
    PDL: gl.constexpr,
):
    # As in decode_hopper_kernel: no copy is started for the last two tiles.
    gl.static_assert(STAGES >= 3)
    H: gl.constexpr = D // 2
    W: gl.constexpr = H if FP8 else D
    # Each warp takes 16 rows of K, or of V transposed, and all query rows.
    mma: gl.constexpr = gl.NVMMADistributedLayout([3 if WGMMA else 2, 0], [NUM_WARPS, 1], [16, M, 16] if WGMMA else [16, 8])
    # Each warp holds all sequences, so that no sum over them crosses warps.
    batch_layout: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [NUM_WARPS], [0])
    lanes: gl.constexpr = lane_layout(TILE, S, W, NUM_WARPS)
    i_p = gl.program_id(0)
    ring = _make_ring(k_desc, v_desc, TILE, W, SCALES, STAGES, NUM_WARPS, BULK, False)
    if PDL:
        i_p = _dependent_launch(i_p)

    # Blocks of one head's query rows are heads of their own here, that read the same keys.
    num_heads = num_kv_heads * ROW_BLOCKS
    o_b = gl.arange(0, BATCH, layout=batch_layout)
    b_len = gl.load(seq_lens_ptr + o_b, mask=o_b < batch, other=0)
    b_tiles = _line_length(b_len, query_len, window, TILE, WINDOW)
    b_tiles = gl.where(o_b < batch, b_tiles * num_heads, 0)
    total = gl.sum(b_tiles, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    here = i_p * share
    end = gl.minimum(here + share, total)
    if here < end:
        # The pair of sequence and head in which this stretch begins.
        before = gl.associative_scan(b_tiles, 0, _add) <= here
        i_b = gl.sum(before.to(gl.int32), 0)
        pair_lo = gl.sum(gl.where(before, b_tiles, 0), 0)
        row_hi = gl.load(seq_lens_ptr + i_b)
        row_lo, first_tile, last_tile = _owned_tiles(row_hi, query_len, window, TILE, WINDOW)
        num_tiles = _line_length(row_hi, query_len, window, TILE, WINDOW)
        i_pair = i_b * num_heads + (here - pair_lo) // num_tiles
        pair_lo += (here - pair_lo) // num_tiles * num_tiles

        i_slot = 0
        phase = 0
        table_ptr = page_table_ptr + i_b.to(gl.int64) * stride_table_b
        tile_lo = first_tile + here - pair_lo
        tile_hi = gl.minimum(first_tile + end - pair_lo, last_tile)
        first_head = _head(
            k_desc, v_desc, i_pair % num_heads // ROW_BLOCKS, k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, k_scale_ptr, v_scale_ptr,
            stride_ks_p, stride_ks_h, stride_ks_s, stride_vs_p, stride_vs_h, stride_vs_s, PER_TOKEN,
        )  # fmt: skip
        _first_copies(
            ring, first_head, i_slot, table_ptr, 0, tile_lo, tile_hi, row_lo, row_hi, TILE, S, K_ROW, V_ROW, SCALES, WINDOW, STAGES, BULK, False, lanes
        )  # fmt: skip
        while here < end:
            i_b = i_pair // num_heads
            i_h = i_pair % num_heads // ROW_BLOCKS
            first_m = i_pair % ROW_BLOCKS * M
            row_lo, first_tile, last_tile = _owned_tiles(row_hi, query_len, window, TILE, WINDOW)
            num_tiles = _line_length(row_hi, query_len, window, TILE, WINDOW)
            stop = gl.minimum(pair_lo + num_tiles, end)
            tile_lo = first_tile + here - pair_lo
            tile_hi = gl.minimum(first_tile + stop - pair_lo, last_tile)
            table_ptr = page_table_ptr + i_b.to(gl.int64) * stride_table_b
            head = _head(
                k_desc, v_desc, i_h, k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, k_scale_ptr, v_scale_ptr,
                stride_ks_p, stride_ks_h, stride_ks_s, stride_vs_p, stride_vs_h, stride_vs_s, PER_TOKEN,
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
            acc0, acc1, p_sum, b_max, v_unit, i_slot, phase = _attend_tiles(
                ring, head, i_slot, phase, right, left, table_ptr, q0, q1, q_scale, soft_cap, first_m, tile_lo, tile_hi, row_lo, row_hi, window, query_len,
                GROUP, M, H, W, TILE, S, K_ROW, V_ROW, FP8, PER_TOKEN, SCALES, CAUSAL, WINDOW, SOFT_CAP, PARTLY > 0, MASK_KV, STAGES, NUM_WARPS, WGMMA, BULK,
                mma,
            )  # fmt: skip

            # The next pair begins where this segment stops, unless the stretch ends there.
            i_next = i_pair + 1
            next_b = i_next // num_heads
            next_hi = gl.load(seq_lens_ptr + next_b, mask=stop < end, other=0)
            next_lo, next_first, next_last = _owned_tiles(next_hi, query_len, window, TILE, WINDOW)
            # Every warp is past its reads of the last tiles: their places can be filled.
            program_barrier()
            next_head = _head(
                k_desc, v_desc, i_next % num_heads // ROW_BLOCKS, k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, k_scale_ptr, v_scale_ptr,
                stride_ks_p, stride_ks_h, stride_ks_s, stride_vs_p, stride_vs_h, stride_vs_s, PER_TOKEN,
            )  # fmt: skip
            _first_copies(
                ring, next_head, i_slot, page_table_ptr + next_b.to(gl.int64) * stride_table_b, 0, next_first, gl.minimum(next_first + end - stop, next_last),
                next_lo, next_hi, TILE, S, K_ROW, V_ROW, SCALES, WINDOW, STAGES, BULK, False, lanes,
            )  # fmt: skip

            v_scale = _value_scale(v_scale_ptr, v_unit, FP8, PER_TOKEN)
            b_sum = gl.convert_layout(gl.sum(p_sum, 0), gl.SliceLayout(0, mma))
            first = pair_lo // share
            last = (pair_lo + num_tiles - 1) // share
            if first == last:
                _write_output(
                    out_ptr, lse_ptr, sinks_ptr, acc0, acc1, b_sum, b_max, v_scale, i_b, i_h, first_m, query_len, stride_out_b, stride_out_t, stride_out_h,
                    stride_lse_b, stride_lse_t, stride_lse_h, GROUP, M, H, FP8, SINKS, mma,
                )  # fmt: skip
            else:
                part = _part_of(i_p, share, pair_lo)
                group = first + (i_p - first) // GROUP_PARTS * GROUP_PARTS
                group_last = gl.minimum(group + GROUP_PARTS - 1, last)
                _write_part(partial_o_ptr, partial_lse_ptr, part, acc0, acc1, b_sum, b_max, v_scale, M, H, mma)
                if _is_last(arrivals_ptr + _part_of(group, share, pair_lo), group_last - group):
                    acc0, acc1, b_sum, b_max = _merge_parts(partial_o_ptr, partial_lse_ptr, group, group_last, 1, share, pair_lo, M, H, mma)
                    complete = last - first < GROUP_PARTS
                    if not complete:
                        # The group's parts are read, and nobody else's: its sum takes the first one's place.
                        program_barrier()
                        _write_part(partial_o_ptr, partial_lse_ptr, _part_of(group, share, pair_lo), acc0, acc1, b_sum, b_max, 1.0, M, H, mma)
                        complete = _is_last(arrivals_ptr + 2 * gl.num_programs(0) + _part_of(first, share, pair_lo), (last - first) // GROUP_PARTS)
                        if complete:
                            acc0, acc1, b_sum, b_max = _merge_parts(
                                partial_o_ptr, partial_lse_ptr, first, last, GROUP_PARTS, share, pair_lo, M, H, mma
                            )  # fmt: skip
                    if complete:
                        _write_output(
                            out_ptr, lse_ptr, sinks_ptr, acc0, acc1, b_sum, b_max, 1.0, i_b, i_h, first_m, query_len, stride_out_b, stride_out_t,
                            stride_out_h, stride_lse_b, stride_lse_t, stride_lse_h, GROUP, M, H, FP8, SINKS, mma,
                        )  # fmt: skip
            here = stop
            pair_lo = stop
            i_pair = i_next
            row_hi = next_hi
