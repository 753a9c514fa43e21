"""Gluon kernels that try one operation each in our interpreter, with faults by choice."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from atoll.ops.attention.gluon_kernel_sm90 import _holds_nan, _ones_before, _widen_halves, _widen_pairs, program_barrier

ROWS = gl.constexpr(4)
WIDTH = gl.constexpr(16)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def widen_kernel(out_ptr, x_ptr, PAIRS: gl.constexpr):
    """[1, 128] int16 of e4m3 pairs as two tensors of fp16 [1, 128]."""
    layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2)
    o_x = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, layout)), 0)
    x = gl.load(x_ptr + o_x)
    first, second = _widen_pairs(x) if PAIRS else _widen_halves(x)
    gl.store(out_ptr + o_x, first)
    gl.store(out_ptr + 128 + o_x, second)


@gluon.jit
def odd_layout_kernel(x_ptr):
    """Neighbours of a layout that gives a thread one element at a time."""
    o_x = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
    _widen_pairs(gl.load(x_ptr + o_x))


@gluon.jit
def copy_masked_kernel(out_ptr, x_ptr, num, fill, FILLED: gl.constexpr):
    o_x = gl.arange(0, 8)
    x = gl.load(x_ptr + o_x, mask=o_x < num, other=fill) if FILLED else gl.load(x_ptr + o_x, mask=o_x < num)
    gl.store(out_ptr + o_x, x, mask=o_x < num + 1, cache_modifier=".cg")


@gluon.jit
def fresh_kernel(out_ptr):
    smem = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.store(out_ptr + gl.arange(0, 8), smem.load(gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def copy_box_kernel(
    out_ptr, desc, i_page, i_row, BYTES: gl.constexpr, INIT: gl.constexpr, WAIT: gl.constexpr, PHASE: gl.constexpr, AGAIN: gl.constexpr, MEET: gl.constexpr
):  # fmt: skip
    """A box of one page through shared memory to `out`; with AGAIN once more into the same place, after all threads have met if MEET."""
    smem = gl.allocate_shared_memory(desc.dtype, [1, ROWS, WIDTH], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if INIT:
        mbarrier.init(bar, count=1)
    fence_async_shared()
    program_barrier()
    mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(desc, [i_page, i_row, 0], bar, smem)
    if WAIT:
        mbarrier.wait(bar, PHASE)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [1, 1], [1, 0])
    o_row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    o_out = o_row * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(out_ptr + o_out, smem.reshape([ROWS, WIDTH]).load(layout))
    if AGAIN:
        if MEET:
            program_barrier()
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(desc, [i_page, i_row, 0], bar, smem)
        mbarrier.wait(bar, 1)


@gluon.jit
def leave_kernel(desc):
    """A copy that nobody waits for."""
    smem = gl.allocate_shared_memory(desc.dtype, [1, ROWS, WIDTH], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, ROWS * WIDTH * 2)
    tma.async_copy_global_to_shared(desc, [0, 0, 0], bar, smem)


@gluon.jit
def copy_lanes_kernel(
    out_ptr, x_ptr, first, STEP: gl.constexpr, COUNT: gl.constexpr, ARRIVALS: gl.constexpr, WAIT: gl.constexpr, AGAIN: gl.constexpr, MEET: gl.constexpr
):  # fmt: skip
    """Rows of x through shared memory to `out`, copied lane by lane, every STEP-th element; with AGAIN once more, after all threads have met if MEET."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    program_barrier()
    o_row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    o_x = o_row * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), 0)
    async_copy.async_copy_global_to_shared(smem, x_ptr + first + STEP * o_x)
    for _ in gl.static_range(ARRIVALS):
        async_copy.mbarrier_arrive(bar, increment_count=False)
    if WAIT:
        mbarrier.wait(bar, 0)
        gl.store(out_ptr + o_x, smem.load(layout))
    if AGAIN:
        if MEET:
            program_barrier()
        async_copy.async_copy_global_to_shared(smem, x_ptr + first + o_x)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        mbarrier.wait(bar, 1)


@gluon.jit
def multiply_kernel(out_ptr, a_ptr, b_ptr):
    """[16, 16] @ [16, 8] + 1."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    o_m = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, mma)), 1)
    o_k = gl.arange(0, 16)
    o_n = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, mma)), 0)
    a = gl.convert_layout(gl.load(a_ptr + o_m * 16 + gl.expand_dims(o_k, 0)), gl.DotOperandLayout(0, mma, 2))
    b = gl.convert_layout(gl.load(b_ptr + gl.expand_dims(o_k, 1) * 8 + o_n), gl.DotOperandLayout(1, mma, 2))
    gl.store(out_ptr + o_m * 8 + o_n, mma_v2(a, b, gl.full([16, 8], 1.0, gl.float32, mma)))


@gluon.jit
def wgmma_kernel(out_ptr, a_ptr, b_ptr, SHARED: gl.constexpr, ASYNC: gl.constexpr, FAULT: gl.constexpr):
    """2 * [64, 16] @ [8, 16].T + 1, the first operand in registers or SHARED."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    layout: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    o_m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, mma)), 1)
    o_n = gl.arange(0, 8)
    o_k = gl.expand_dims(gl.arange(0, 16), 0)
    a = gl.load(a_ptr + o_m * 16 + o_k)
    b = gl.load(b_ptr + gl.expand_dims(o_n, 1) * 16 + o_k)
    a_smem = gl.allocate_shared_memory(a.dtype, [64, 16], layout, a)
    b_smem = gl.allocate_shared_memory(b.dtype, [8, 16], layout)
    b_smem.store(b)
    if FAULT == "barrier before the fence":
        program_barrier()
    if FAULT != "no fence":
        fence_async_shared()
    if FAULT != "no barrier" and FAULT != "barrier before the fence":
        program_barrier()
    a = a_smem if SHARED else gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2))
    acc = warpgroup_mma(a, b_smem.permute((1, 0)), gl.full([64, 8], 99.0, gl.float32, mma), use_acc=False, is_async=ASYNC)
    acc = warpgroup_mma(a, b_smem.permute((1, 0)), acc, is_async=ASYNC)
    one = gl.full([64, 8], 1.0, gl.float32, mma)
    if FAULT == "store before the wait":
        b_smem.store(b)
    if FAULT == "use before the wait":
        one = one + acc
    if FAULT == "some outstanding":
        warpgroup_mma_wait(1, [acc])
    if ASYNC and FAULT != "no wait":
        acc, one = warpgroup_mma_wait(0, [acc, one])
    if FAULT != "no wait":
        gl.store(out_ptr + o_m * 8 + gl.expand_dims(o_n, 0), acc + one)


@gluon.jit
def multiply_box_kernel(out_ptr, desc, FAULT: gl.constexpr):
    """The product of a box with itself transposed, [64, 64]; then another box in its place."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    smem = gl.allocate_shared_memory(desc.dtype, [1, 64, WIDTH], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if FAULT == "copy over a store":
        smem.reshape([64, WIDTH]).store(gl.zeros([64, WIDTH], desc.dtype))
    else:
        fence_async_shared()
    program_barrier()
    mbarrier.expect(bar, 64 * WIDTH * 2)
    tma.async_copy_global_to_shared(desc, [0, 0, 0], bar, smem)
    if FAULT != "no wait for the copy":
        mbarrier.wait(bar, 0)
    tile = smem.reshape([64, WIDTH])
    acc = warpgroup_mma(tile, tile.permute((1, 0)), gl.zeros([64, 64], gl.float32, mma), is_async=True)
    if FAULT == "copy before the wait":
        program_barrier()
    else:
        acc = warpgroup_mma_wait(0, [acc])
        if FAULT != "no meeting":
            program_barrier()
    mbarrier.expect(bar, 64 * WIDTH * 2)
    tma.async_copy_global_to_shared(desc, [1, 0, 0], bar, smem)
    mbarrier.wait(bar, 1)
    o_m = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, mma)), 1)
    gl.store(out_ptr + o_m * 64 + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, mma)), 0), acc)


@gluon.jit
def reinterpret_kernel(out_ptr, x_ptr, NUM: gl.constexpr, ROW: gl.constexpr):
    """[4, 8] int16 in shared memory as NUM int32; with ROW only the first ROW of each row."""
    o_x = gl.expand_dims(gl.arange(0, 4), 1) * 8 + gl.expand_dims(gl.arange(0, 8), 0)
    x = gl.load(x_ptr + o_x)
    smem = gl.allocate_shared_memory(gl.int16, [4, 8], gl.NVMMASharedLayout(0, 16, 2), x)
    words = smem.slice(0, ROW, dim=1)._reinterpret(gl.int32, [NUM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.store(out_ptr + gl.arange(0, NUM), words.load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def split_kernel(out_ptr, x_ptr):
    """[8, 2] as its two columns, by either name."""
    o_x = gl.arange(0, 8)
    x = gl.load(x_ptr + gl.expand_dims(o_x, 1) * 2 + gl.expand_dims(gl.arange(0, 2), 0))
    first, second = x.split()
    gl.store(out_ptr + o_x, second)
    first, second = gl.split(x)
    gl.store(out_ptr + 8 + o_x, first)


@gluon.jit
def bitcast_kernel(out_ptr, words_ptr):
    """256 bytes of e4m3, given as int32, as fp32; stored two by two as int64."""
    o_x = gl.arange(0, 128)
    bytes_ptr = words_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + 2 * o_x
    low = gl.load(bytes_ptr).to(gl.float32).to(gl.uint32, bitcast=True).to(gl.int64)
    high = gl.load(bytes_ptr + 1).to(gl.float32).to(gl.uint32, bitcast=True).to(gl.int64)
    gl.store(out_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + o_x, low | (high << 32))


@gluon.jit
def holds_nan_kernel(out_ptr, x_ptr, FP8: gl.constexpr, BF16: gl.constexpr):
    """Of each program's four int32."""
    x = gl.load(x_ptr + gl.program_id(0) * 4 + gl.arange(0, 4))
    gl.store(out_ptr + gl.program_id(0), _holds_nan(x, FP8, BF16))


@gluon.jit
def ones_kernel(out_ptr, row, i_tile, TILE: gl.constexpr):
    """[TILE] int16, of each column of a multiply's operand."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
    gl.store(out_ptr + gl.arange(0, TILE, layout=layout), _ones_before(row, i_tile, TILE, layout))


@gluon.jit
def reduce_kernel(out_ptr, x_ptr):
    """Of [8] fp32: maximum, minimum, sum, and the running sum forwards and backwards."""
    o_x = gl.arange(0, 8)
    x = gl.load(x_ptr + o_x)
    gl.store(out_ptr, gl.max(x, 0))
    gl.store(out_ptr + 1, gl.min(x, 0))
    gl.store(out_ptr + 2, gl.sum(x, 0))
    gl.store(out_ptr + 8 + o_x, gl.associative_scan(x, 0, _sum))
    gl.store(out_ptr + 16 + o_x, gl.associative_scan(x, 0, _sum, reverse=True))


@gluon.jit
def arrive_kernel(seen_ptr, counter_ptr):
    """Which program came when; the last one sets the counter back."""
    i_p = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    when = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    gl.store(seen_ptr + when, i_p)
    if when == gl.num_programs(0) * gl.num_programs(1) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def walk_kernel(out_ptr, num):
    """A loop with a bound of its own."""
    total = 0
    i = gl.program_id(0)
    while i < num:
        for j in range(i):
            total += j.to(gl.int32)
        i += gl.num_programs(0)
    gl.store(out_ptr + gl.program_id(0), total)


@gluon.jit
def unknown_kernel(x_ptr):
    gl.histogram(gl.load(x_ptr + gl.arange(0, 8)), 4)


@gluon.jit
def unknown_function_kernel(x_ptr):
    async_copy.commit_group()
