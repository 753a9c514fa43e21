"""How pages come into shared memory for the Hopper kernels: a ring of tiles of K and V, filled by TMA or, where a tile has several pages, lane by lane.

TMA takes one page a copy, which one thread issues while all others meet around it. The lanes' own copies (cp.async) know no pages: a warp's lanes take whole
rows, 16 bytes each, and all of a tile's pages cost what one does. Scales of tokens always come lane by lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Of all threads of a program. Triton 3.7 gave it another name.
program_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def lane_layout(tile, page_size, width, num_warps):
    """Who copies what of a tile [pages, rows of a page, 16-bit elements]: 16 bytes a lane, rows over lanes, pages over warps."""
    pages = max(tile // page_size, 1)
    page_warps = min(pages, num_warps)
    return gl.BlockedLayout([1, 1, 8], [1, 256 // width, width // 8], [page_warps, num_warps // page_warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _scale_layout(lanes):
    """Who copies which scale of a tile."""
    page_warps, row_warps, _ = lanes.warps_per_cta
    return gl.BlockedLayout([1], [32], [page_warps * row_warps], [0])


@gluon.jit
def _make_ring(
    k_desc, v_desc, TILE: gl.constexpr, W: gl.constexpr, PER_TOKEN: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, BULK: gl.constexpr
):  # fmt: skip
    """Shared memory for STAGES tiles of K and of V, the barriers of their copies, and the tiles' scales if PER_TOKEN."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, TILE, W], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, TILE, W], v_desc.layout)
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Who arrives: the thread that starts copies by TMA, and all that copy for themselves.
    COUNT: gl.constexpr = (1 if BULK else 0) + (32 * NUM_WARPS if PER_TOKEN or not BULK else 0)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(i), count=COUNT)
        mbarrier.init(v_bars.index(i), count=COUNT)
    k_scales = k_bars
    v_scales = v_bars
    if PER_TOKEN:
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # The copies' engine must see the barriers ready before the first copy.
    fence_async_shared()
    program_barrier()
    return k_smem, v_smem, k_bars, v_bars, k_scales, v_scales


@gluon.jit
def _head(
    k_desc, v_desc, i_h, k_ptr, v_ptr, stride_k_p, stride_k_h, stride_v_p, stride_v_h, k_scale_ptr, v_scale_ptr,
    stride_ks_p, stride_ks_h, stride_ks_s, stride_vs_p, stride_vs_h, stride_vs_s, PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """Where the pages of one KV head are: for TMA the descriptors and the head; for lanes K's and V's words with the stride of a page, and so their scales,
    with the stride of a row too.
    """
    k_words = (k_ptr + i_h.to(gl.int64) * stride_k_h, stride_k_p)
    v_words = (v_ptr + i_h.to(gl.int64) * stride_v_h, stride_v_p)
    if PER_TOKEN:
        k_scale_words = (k_scale_ptr + i_h.to(gl.int64) * stride_ks_h, stride_ks_p, stride_ks_s)
        v_scale_words = (v_scale_ptr + i_h.to(gl.int64) * stride_vs_h, stride_vs_p, stride_vs_s)
        return k_desc, v_desc, i_h, k_words, v_words, k_scale_words, v_scale_words
    else:
        return k_desc, v_desc, i_h, k_words, v_words, (), ()


@gluon.jit
def _pages_of_tile(
    table_ptr, i_tile, tile_hi, row_lo, row_hi, TILE: gl.constexpr, S: gl.constexpr, PER_TOKEN: gl.constexpr, WINDOW: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """A tile's page id, or several [TILE / S]; if PER_TOKEN also its rows [TILE], for their scales, and the page ids of these.

    Entries of pages without an owned row, and of tiles past the last, are not read: they may hold anything. In place of such a page, and of a row that is not
    owned, stands the nearest owned one, so that every copy may run: K and V are masked by a row's place in the tile, and a scale once more changes no maximum.
    """
    wanted = i_tile < tile_hi
    if S >= TILE:
        page = gl.load(table_ptr + i_tile * TILE // S, mask=wanted, other=0)
    else:
        o_page = i_tile * (TILE // S) + gl.arange(0, TILE // S, layout=gl.SliceLayout(1, gl.SliceLayout(2, lanes)))
        o_page = gl.minimum(o_page, (row_hi - 1) // S)
        if WINDOW:
            o_page = gl.maximum(o_page, row_lo // S)
        page = gl.load(table_ptr + o_page, mask=wanted, other=0)
    if PER_TOKEN:
        o_row = i_tile * TILE + gl.arange(0, TILE, layout=_scale_layout(lanes))
        o_row = gl.minimum(o_row, row_hi - 1)  # owned: scales
        if WINDOW:
            o_row = gl.maximum(o_row, row_lo)  # owned: scales left of a window
        return page, o_row, gl.load(table_ptr + o_row // S, mask=wanted, other=0)
    else:
        return page, page, page


@gluon.jit
def _copy_rows(smem, words, page, slot, ROWS: gl.constexpr, STRIDE: gl.constexpr, lanes: gl.constexpr):
    """Start each lane's copies of ROWS rows, from `slot` on, of each page of a tile."""
    ptr, stride_p = words
    W: gl.constexpr = smem.shape[3]
    NUM: gl.constexpr = smem.shape[2] // ROWS
    o_s = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, lanes)))
    o_w = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(0, lanes)))
    o_kv = gl.expand_dims(gl.expand_dims(o_s * STRIDE, 0), 2) + gl.expand_dims(gl.expand_dims(o_w, 0), 0)
    # From words to 16-bit elements.
    first = ptr.to(gl.pointer_type(smem.dtype), bitcast=True) + (page.to(gl.int64) * stride_p * 2 + slot * STRIDE)
    if NUM > 1:
        first = gl.expand_dims(gl.expand_dims(first, 1), 2)
    # All strides are multiples of 16 bytes, as for TMA.
    pointer = gl.max_contiguous(gl.multiple_of(first + o_kv, [1, 1, 16]), [1, 1, 8])
    async_copy.async_copy_global_to_shared(smem.reshape([NUM, ROWS, W]), pointer)


@gluon.jit
def _copy_scales(smem, words, page, o_row, S: gl.constexpr):
    """Start each lane's copies of the scales of rows `o_row`, which lie on pages `page`."""
    ptr, stride_p, stride_s = words
    async_copy.async_copy_global_to_shared(smem, ptr + (page.to(gl.int64) * stride_p + o_row % S * stride_s))


@gluon.jit
def _copy_tile(
    ring, head, i_slot, pages, i_tile, tile_hi, TILE: gl.constexpr, S: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr, PER_TOKEN: gl.constexpr,
    BULK: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile's K and V, and of their scales if PER_TOKEN, from one head of the pages that `_pages_of_tile` found."""
    k_smem, v_smem, k_bars, v_bars, k_scales, v_scales = ring
    k_desc, v_desc, i_h, k_words, v_words, k_scale_words, v_scale_words = head
    page, o_row, row_page = pages
    wanted = i_tile < tile_hi
    k_bar = k_bars.index(i_slot)
    v_bar = v_bars.index(i_slot)
    slot = i_tile * TILE % S
    ROWS: gl.constexpr = S if S < TILE else TILE
    if BULK:
        BYTES: gl.constexpr = TILE * k_desc.block_type.shape[3] * 2
        # Both barriers are armed before the first copy: between two writes of one buffer the compiler has all warps wait for each other.
        mbarrier.expect(k_bar, BYTES, pred=wanted)
        mbarrier.expect(v_bar, BYTES, pred=wanted)
        tma.async_copy_global_to_shared(k_desc, [page, i_h, slot, 0], k_bar, k_smem.index(i_slot), pred=wanted)
        tma.async_copy_global_to_shared(v_desc, [page, i_h, slot, 0], v_bar, v_smem.index(i_slot), pred=wanted)
    if PER_TOKEN or not BULK:
        if wanted:
            # A barrier counts each thread once what it has copied so far is there.
            if PER_TOKEN:
                _copy_scales(k_scales.index(i_slot), k_scale_words, row_page, o_row, S)
            if not BULK:
                _copy_rows(k_smem.index(i_slot), k_words, page, slot, ROWS, K_ROW, lanes)
            async_copy.mbarrier_arrive(k_bar, increment_count=False)
            if PER_TOKEN:
                _copy_scales(v_scales.index(i_slot), v_scale_words, row_page, o_row, S)
            if not BULK:
                _copy_rows(v_smem.index(i_slot), v_words, page, slot, ROWS, V_ROW, lanes)
            async_copy.mbarrier_arrive(v_bar, increment_count=False)


@gluon.jit
def _first_copies(
    ring, head, i_slot, table_ptr, tile_lo, tile_hi, row_lo, row_hi, TILE: gl.constexpr, S: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr,
    PER_TOKEN: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, BULK: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first STAGES - 1 tiles into the slots from `i_slot` on."""
    for i in gl.static_range(STAGES - 1):
        pages = _pages_of_tile(table_ptr, tile_lo + i, tile_hi, row_lo, row_hi, TILE, S, PER_TOKEN, WINDOW, lanes)
        _copy_tile(ring, head, (i_slot + i) % STAGES, pages, tile_lo + i, tile_hi, TILE, S, K_ROW, V_ROW, PER_TOKEN, BULK, lanes)
