"""How pages come into shared memory for the Hopper kernels: a ring of tiles of K and V, filled by TMA or, where a tile has many pages, lane by lane.

TMA takes one page a copy, which one thread issues while all others meet around it. The lanes' own copies (cp.async) know no pages: a warp's lanes take whole
rows, 16 bytes each, and all of a tile's pages cost what one does. Scales of tokens come lane by lane, with their tile or into registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Of all threads of a program. Triton 3.7 gave it another name.
program_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Of the 228 KiB of a multiprocessor, 1 KiB of each program's is the system's, and 1 KiB or more are exchanges of its warps.
_HALF_SM_BYTES = 112 << 10


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


@gluon.constexpr_function
def _spare_slots(tile, width, stages, alone):
    """Slots of K that no tile comes into: if `alone` as many as it takes for two programs not to fit a multiprocessor, with the little that each has beside."""
    slot = 2 * tile * width
    return max(0, -(-_HALF_SM_BYTES // slot) - 2 * stages) if alone else 0


@gluon.jit
def _make_ring(
    k_desc, v_desc, TILE: gl.constexpr, W: gl.constexpr, SCALES: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, BULK: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    """Shared memory for STAGES tiles of K and of V, the barriers of their copies, and the tiles' scales if SCALES."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES + _spare_slots(TILE, W, STAGES, ALONE), 1, 1, TILE, W], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, TILE, W], v_desc.layout)
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Who arrives: the thread that starts copies by TMA, and all that copy for themselves; scales, V's too, are counted with K.
    V_COUNT: gl.constexpr = 1 if BULK else 32 * NUM_WARPS
    K_COUNT: gl.constexpr = V_COUNT + 32 * NUM_WARPS if BULK and SCALES else V_COUNT
    for i in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(i), count=K_COUNT)
        mbarrier.init(v_bars.index(i), count=V_COUNT)
    k_scales = k_bars
    v_scales = v_bars
    if SCALES:
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
def _owned_rows(o_row, row_lo, row_hi, WINDOW: gl.constexpr):
    """Rows, and in place of one that is not owned the nearest that is: its scale once more changes no maximum."""
    o_row = gl.minimum(o_row, row_hi - 1)  # owned: scales
    if WINDOW:
        o_row = gl.maximum(o_row, row_lo)  # owned: scales left of a window
    return o_row


@gluon.jit
def _owned_pages(o_page, row_lo, row_hi, S: gl.constexpr, WINDOW: gl.constexpr):
    """Pages of a sequence by number, and in place of one without an owned row the nearest that has some: K and V are masked by a row's place in the tile."""
    o_page = gl.minimum(o_page, (row_hi - 1) // S)
    if WINDOW:
        o_page = gl.maximum(o_page, row_lo // S)
    return o_page


@gluon.jit
def _pages_of_tile(
    table_ptr, i_tile, tile_hi, row_lo, row_hi,
    TILE: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr, BULK: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """A tile's page ids, one by one if BULK, else [TILE / S].

    Entries of pages without an owned row, and of tiles past the last, are not read: they may hold anything.
    """
    wanted = i_tile < tile_hi
    NUM: gl.constexpr = TILE // S
    if NUM <= 1:
        return (gl.load(table_ptr + i_tile * TILE // S, mask=wanted, other=0),)
    elif BULK:
        pages = ()
        for i in gl.static_range(NUM):
            pages += (gl.load(table_ptr + _owned_pages(i_tile * NUM + i, row_lo, row_hi, S, WINDOW), mask=wanted, other=0),)  # type: ignore[assignment]
        return pages
    else:
        o_page = i_tile * NUM + gl.arange(0, NUM, layout=gl.SliceLayout(1, gl.SliceLayout(2, lanes)))
        return (gl.load(table_ptr + _owned_pages(o_page, row_lo, row_hi, S, WINDOW), mask=wanted, other=0),)


@gluon.jit
def _first_pages(table_ptr, i_tile, row_hi, num_lanes, TILE: gl.constexpr, S: gl.constexpr, BULK: gl.constexpr, lanes: gl.constexpr):
    """The pages that `_pages_of_tile` finds, of a sequence without a window, read while its length still is: in place of one without an owned row stands
    the tile's first.

    Entries without an owned row are read here too, but nothing comes of them.
    """
    NUM: gl.constexpr = TILE // S
    o_first = i_tile * TILE // S
    first = gl.load(table_ptr + o_first, mask=o_first < num_lanes, other=0)
    if NUM <= 1:
        return (first,)
    elif BULK:
        pages = (first,)
        for i in gl.static_range(1, NUM):
            page = gl.load(table_ptr + o_first + i, mask=o_first + i < num_lanes, other=0)
            pages += (gl.where((o_first + i) * S < row_hi, page, first),)  # type: ignore[assignment]
        return pages
    else:
        o_page = o_first + gl.arange(0, NUM, layout=gl.SliceLayout(1, gl.SliceLayout(2, lanes)))
        page = gl.load(table_ptr + o_page, mask=o_page < num_lanes, other=0)
        return (gl.where(o_page * S < row_hi, page, first),)


@gluon.jit
def _scale_rows(table_ptr, i_tile, tile_hi, row_lo, row_hi, o_n, TILE: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr):
    """Where the scales of a tile's rows `o_n` are: rows that are owned, and the page ids of these, 0 past the last tile."""
    o_row = _owned_rows(i_tile * TILE + o_n, row_lo, row_hi, WINDOW)
    return o_row, gl.load(table_ptr + o_row // S, mask=i_tile < tile_hi, other=0)


@gluon.jit
def _copied_scale_rows(
    table_ptr, i_tile, tile_hi, row_lo, row_hi, TILE: gl.constexpr, S: gl.constexpr, SCALES: gl.constexpr, WINDOW: gl.constexpr, lanes: gl.constexpr
):  # fmt: skip
    """`_scale_rows` of those that each thread copies, if SCALES."""
    if SCALES:
        return _scale_rows(table_ptr, i_tile, tile_hi, row_lo, row_hi, gl.arange(0, TILE, layout=_scale_layout(lanes)), TILE, S, WINDOW)
    else:
        return ()


@gluon.jit
def _load_scales(words, rows, wanted, S: gl.constexpr):
    """The scales that `_scale_rows` has found; 0 where not `wanted`."""
    ptr, stride_p, stride_s = words
    o_row, page = rows
    return gl.load(ptr + (page.to(gl.int64) * stride_p + o_row % S * stride_s), mask=wanted, other=0.0)


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
def _copy_scales(smem, words, rows, S: gl.constexpr):
    """Start each lane's copies of the scales that `_scale_rows` has found."""
    ptr, stride_p, stride_s = words
    o_row, page = rows
    async_copy.async_copy_global_to_shared(smem, ptr + (page.to(gl.int64) * stride_p + o_row % S * stride_s))


@gluon.jit
def _copy_tile(
    ring, head, i_slot, pages, scale_rows, i_tile, tile_hi, TILE: gl.constexpr, S: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr,
    SCALES: gl.constexpr, BULK: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile's K and V, and of their scales if SCALES, from one head of the pages that `_pages_of_tile` and
    `_copied_scale_rows` have found.
    """
    k_smem, v_smem, k_bars, v_bars, k_scales, v_scales = ring
    k_desc, v_desc, i_h, k_words, v_words, k_scale_words, v_scale_words = head
    wanted = i_tile < tile_hi
    k_bar = k_bars.index(i_slot)
    v_bar = v_bars.index(i_slot)
    slot = i_tile * TILE % S
    ROWS: gl.constexpr = S if S < TILE else TILE
    if BULK:
        BYTES: gl.constexpr = TILE * k_desc.block_type.shape[3] * 2
        # Both barriers are armed before the first copy, and K and V take turns: between two writes of one buffer the compiler has all warps meet.
        mbarrier.expect(k_bar, BYTES, pred=wanted)
        mbarrier.expect(v_bar, BYTES, pred=wanted)
        for i in gl.static_range(TILE // ROWS):
            tma.async_copy_global_to_shared(k_desc, [pages[i], i_h, slot, 0], k_bar, k_smem.index(i_slot).slice(i * ROWS, ROWS, dim=2), pred=wanted)
            tma.async_copy_global_to_shared(v_desc, [pages[i], i_h, slot, 0], v_bar, v_smem.index(i_slot).slice(i * ROWS, ROWS, dim=2), pred=wanted)
    if SCALES or not BULK:
        if wanted:
            # A barrier counts each thread once what it has copied so far is there.
            if SCALES:
                _copy_scales(k_scales.index(i_slot), k_scale_words, scale_rows, S)
                _copy_scales(v_scales.index(i_slot), v_scale_words, scale_rows, S)
            if not BULK:
                _copy_rows(k_smem.index(i_slot), k_words, pages[0], slot, ROWS, K_ROW, lanes)
            async_copy.mbarrier_arrive(k_bar, increment_count=False)
            if not BULK:
                _copy_rows(v_smem.index(i_slot), v_words, pages[0], slot, ROWS, V_ROW, lanes)
                async_copy.mbarrier_arrive(v_bar, increment_count=False)


@gluon.jit
def _first_copies(
    ring, head, i_slot, table_ptr, num_lanes, tile_lo, tile_hi, row_lo, row_hi, TILE: gl.constexpr, S: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr,
    SCALES: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, BULK: gl.constexpr, WHOLE: gl.constexpr, lanes: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first STAGES - 1 tiles into the slots from `i_slot` on; of a sequence's own first ones if WHOLE, which has no window."""
    found = ()
    for i in gl.static_range(STAGES - 1):
        if WHOLE:
            pages = _first_pages(table_ptr, tile_lo + i, row_hi, num_lanes, TILE, S, BULK, lanes)
        else:
            pages = _pages_of_tile(table_ptr, tile_lo + i, tile_hi, row_lo, row_hi, TILE, S, WINDOW, BULK, lanes)
        found += ((pages, _copied_scale_rows(table_ptr, tile_lo + i, tile_hi, row_lo, row_hi, TILE, S, SCALES, WINDOW, lanes)),)  # type: ignore[assignment]
    for i in gl.static_range(STAGES - 1):
        pages, scale_rows = found[i]  # type: ignore[var-annotated]
        _copy_tile(ring, head, (i_slot + i) % STAGES, pages, scale_rows, tile_lo + i, tile_hi, TILE, S, K_ROW, V_ROW, SCALES, BULK, lanes)
