"""Our interpreter of Gluon: each operation against facts of NumPy and torch, and each hazard seen."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atoll.probe.gluon_interpreter import Order, gluon_interpreted
from atoll.probe.gluon_memory import HazardError
from atoll.probe.gluon_values import NotInterpretedError, Value, as_value, bits_of
from atoll.probe.ptx import run_ptx
from atoll.probe.watch import OutOfRangeError, watched
from tests.ops import gluon_kernels

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def launch(kernel: Any, *args: Any, grid: tuple[int, ...] = (1,), order: Order = 0, **constants: Any) -> None:
    with gluon_interpreted(order):
        kernel[grid](*args, num_warps=4, **constants)


def values(numbers: list[float] | list[int], dtype: tl.dtype) -> Value:
    return Value(np.array(numbers), tl.float64 if dtype.is_floating() else tl.int64).to(dtype)


@pytest.mark.parametrize(("x", "y"), [(7, 2), (-7, 2), (7, -2), (-7, -2), (-8, 2), (0, -3)])
def test_integers_divide_as_in_c(x: int, y: int) -> None:
    expected = torch.div(torch.tensor(x), torch.tensor(y), rounding_mode="trunc").item()
    for quotient, remainder in ((as_value(x) // y, as_value(x) % y), (x // as_value(y), x % as_value(y))):
        assert quotient.data == expected
        assert remainder.data == x - expected * y


def test_a_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        as_value(1) // as_value(0)


def test_integers_wrap_in_their_own_width() -> None:
    largest = values([2**31 - 1], tl.int32)
    assert (largest + 1).data.tolist() == [-(2**31)]
    assert (largest.to(tl.int64) + 1).data.tolist() == [2**31]


@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        (tl.int32, tl.int64, tl.int64),
        (tl.int32, tl.float16, tl.float16),
        (tl.float16, tl.bfloat16, tl.float16),
        (tl.bfloat16, tl.bfloat16, tl.bfloat16),
        (tl.bfloat16, tl.float32, tl.float32),
        (tl.float16, 0.1, tl.float16),
        (tl.int32, 0.1, tl.float32),
        (tl.int1, 2, tl.int32),
    ],
)
def test_operands_are_promoted_as_triton_does(x: tl.dtype, y: tl.dtype | float, dtype: tl.dtype) -> None:
    other = values([1], y) if isinstance(y, tl.dtype) else y
    assert (values([1], x) * other).dtype == dtype


def test_halves_are_divided_in_fp32_and_integers_too() -> None:
    for dtype in (tl.float16, tl.bfloat16, tl.int32):
        quotient = values([1], dtype) / values([3], dtype)
        assert quotient.dtype == tl.float32
        assert quotient.data == np.float32(1) / np.float32(3)


@pytest.mark.parametrize(("dtype", "theirs"), [(tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16)])
def test_conversions_round_to_the_nearest_with_ties_to_even(dtype: tl.dtype, theirs: torch.dtype) -> None:
    given = torch.cat((torch.randn(1000) * torch.exp(4 * torch.randn(1000)), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e30, -1e30, torch.inf, torch.nan, -0.0])))
    with np.errstate(all="ignore"):
        ours = Value(given.numpy(), tl.float32).to(dtype)
        bits = torch.from_numpy(bits_of(ours).astype(np.int64))
    expected = given.to(theirs)
    same = bits == (expected.view(torch.int16).long() & 0xFFFF)
    assert (same | (expected.isnan() & torch.from_numpy(np.isnan(ours.data)))).all()


def test_floats_become_integers_towards_zero_within_what_there_is() -> None:
    given = values([1.9, -1.9, 1e20, -1e20, float("nan")], tl.float32)
    assert given.to(tl.int32).data.tolist() == [1, -1, 2**31 - 1, -(2**31), 0]


def test_only_scalars_are_conditions() -> None:
    assert not as_value(0)
    with pytest.raises(TypeError, match="is no condition"):
        bool(values([1, 1], tl.int32) == 1)


def test_shapes_of_two_ranks_are_refused() -> None:
    with pytest.raises(TypeError, match="are of two ranks"):
        Value(np.zeros((2, 3)), tl.float64) + Value(np.zeros(3), tl.float64)


@pytest.mark.parametrize("pairs", [True, False])
def test_every_byte_of_e4m3_widens_as_torch_widens_it(pairs: bool) -> None:
    out = torch.empty(2, 128, dtype=torch.float16)
    launch(gluon_kernels.widen_kernel, out, ALL_BYTES.view(torch.int16), PAIRS=pairs)
    wide = ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float16)
    # Pairs: the bytes of every even int16, then of every odd one. Halves: all low bytes, then all high ones.
    expected = wide.view(64, 2, 2).transpose(0, 1) if pairs else wide.view(128, 2).T
    torch.testing.assert_close(out, expected.reshape(2, 128), rtol=0, atol=0, equal_nan=True)
    assert out.isnan().sum() == 2


def test_neighbours_are_not_guessed() -> None:
    with pytest.raises(NotInterpretedError, match="which are neighbours is unknown"):
        launch(gluon_kernels.odd_layout_kernel, ALL_BYTES.view(torch.int16))


def test_bytes_are_permuted_by_digit() -> None:
    low, high = np.array([0x33221100], np.uint32), np.array([0x77665544], np.uint32)
    [result] = run_ptx("prmt.b32 $0, $1, $2, 0x7051;", "=r,r,r", [low, high])
    assert result.tolist() == [0x77005511]


def test_ones_are_as_many_as_there_is_room_for() -> None:
    start, num = np.array([0, 0, 4, 31, 32, 2**32 - 1], np.uint32), np.array([0, 2**32 - 1, 8, 2, 1, 1], np.uint32)
    [result] = run_ptx("bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [start, num])
    assert result.tolist() == [0, 0xFFFFFFFF, 0xFF0, 0x80000000, 0, 0]


def test_a_maximum_of_signed_numbers() -> None:
    [result] = run_ptx("max.s32 $0, $1, 0;", "=r,r", [np.array([5, 2**32 - 5], np.uint32)])
    assert result.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("add.u32 $0, $1, $1;", "add.u32"),
        ("mov.b32 $0, t;", "'t'"),
        ("mov.b32 t, $1;", "'t' is not declared"),
        (".reg .f32 t;", ".f32"),
        ("prmt.b32 $0, $1, $1, 0x8000;", "prmt"),
        ("prmt.b32 $0, $1, $1, $1;", "prmt"),
        ("{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mov.b32 $0, $1; }", "mov.b32 $0, $1' is not interpreted under a predicate"),
        ("@p cp.async.bulk.prefetch.L2.global [$1], 16;", "'p'"),
    ],
)
def test_ptx_that_is_not_known_is_named(text: str, named: str) -> None:
    with pytest.raises(NotInterpretedError, match=re.escape(named)):
        run_ptx(text, "=r,r", [np.zeros(1, np.uint32)])


def prefetch(address: int, num_bytes: int) -> None:
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2; }"
    [result] = run_ptx(text, "=r,l,r", [np.array([address, 1], np.uint64), np.array([num_bytes, 0], np.uint32)])
    assert result.tolist() == [num_bytes, 0]


def test_a_prefetch_stays_inside_one_buffer() -> None:
    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with watched([x, y]):
        prefetch(x.data_ptr(), 256)
        prefetch(x.data_ptr() + 240, 16)
    assert x.tolist() == list(range(64))
    for first, num_bytes in ((x.data_ptr() + 16, 256), (x.data_ptr() - 16, 32), (0, 16), (2**64 - 16, 16)):
        with pytest.raises(OutOfRangeError, match=f"prefetch of {num_bytes} bytes at {first:#x}"), watched([x]):
            prefetch(first, num_bytes)


def test_a_prefetch_is_of_whole_units() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    for first, num_bytes in ((x.data_ptr() + 8, 16), (x.data_ptr(), 24)):
        with pytest.raises(ValueError, match=f"a prefetch of {num_bytes} bytes at {first:#x}, which are not both multiples of 16"), watched([x]):
            prefetch(first, num_bytes)


def test_an_operation_that_is_not_known_is_named() -> None:
    with pytest.raises(NotInterpretedError, match=r"gl\.histogram"):
        launch(gluon_kernels.unknown_kernel, torch.zeros(8, dtype=torch.int32))
    with pytest.raises(NotInterpretedError, match=r"async_copy\.commit_group"):
        launch(gluon_kernels.unknown_function_kernel, torch.zeros(8, dtype=torch.int32))
    with pytest.raises(NotInterpretedError, match=r"tensor\.cumsum"):
        as_value(1).cumsum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_hidden_lanes_are_neither_read_nor_written(dtype: torch.dtype) -> None:
    x, out = torch.arange(8).to(dtype), torch.full((8,), 99).to(dtype)
    # A lane that the mask hides may lie beyond all buffers.
    short = x[:5].clone()
    with watched([short, out]):
        launch(gluon_kernels.copy_masked_kernel, out, short, 5, 7, FILLED=True)
    assert out.tolist() == [0, 1, 2, 3, 4, 7, 99, 99]


def test_what_a_mask_hides_is_hostile_where_nothing_is_given_instead() -> None:
    out = torch.zeros(8)
    launch(gluon_kernels.copy_masked_kernel, out, torch.ones(8), 5, 0, FILLED=False)
    assert out[:5].tolist() == [1] * 5
    assert out[5].isnan()


def test_a_stray_lane_is_found_and_not_touched() -> None:
    x, out = torch.ones(5), torch.zeros(8)
    with pytest.raises(OutOfRangeError, match="load of 3 lanes"), watched([x, out]):
        launch(gluon_kernels.copy_masked_kernel, out, x, 8, 7, FILLED=True)
    assert out.tolist() == [1, 1, 1, 1, 1, 7, 7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int16])
def test_fresh_shared_memory_is_nan_in_every_reading(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    launch(gluon_kernels.fresh_kernel, out)
    for reading in (dtype, torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        if reading.is_floating_point:
            assert out.view(reading).isnan().all()


PAGES = torch.arange(3 * 8 * 16, dtype=torch.int16).view(3, 8, 16)


def copy_box(i_page: int = 1, i_row: int = 0, **faults: Any) -> torch.Tensor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)
    descriptor = TensorDescriptor(PAGES, list(PAGES.shape), list(PAGES.stride()), [1, 4, 16], layout)
    out = torch.zeros(4, 16, dtype=torch.int16)
    choices = {"BYTES": 128, "INIT": True, "WAIT": True, "PHASE": 0, "AGAIN": False, "MEET": True} | faults
    with watched([out, PAGES]):
        launch(gluon_kernels.copy_box_kernel, out, descriptor, i_page, i_row, **choices)
    return out


def test_a_box_arrives() -> None:
    assert torch.equal(copy_box(2, 3), PAGES[2, 3:7])
    assert torch.equal(copy_box(AGAIN=True), PAGES[1, :4])


@pytest.mark.parametrize("i_row", [6, -2])
def test_a_box_beyond_the_tensor_reads_zeros(i_row: int) -> None:
    expected = torch.zeros(4, 16, dtype=torch.int16)
    rows = [i for i in range(4) if 0 <= i_row + i < 8]
    expected[rows] = PAGES[1, [i_row + i for i in rows]]
    assert torch.equal(copy_box(1, i_row), expected)


@pytest.mark.parametrize("i_page", [3, -1, 2**31 - 1])
def test_a_box_of_a_page_that_does_not_exist_is_found(i_page: int) -> None:
    with pytest.raises(OutOfRangeError, match="copy of a box at"):
        copy_box(i_page)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"WAIT": False}, "a read of shared memory that a copy in flight is still to write"),
        ({"BYTES": 256}, "a wait for 256 bytes, where 128 were issued, would hang"),
        ({"BYTES": 64}, "a wait for 64 bytes, where 128 were issued, would hang"),
        ({"INIT": False}, "before mbarrier.init"),
        # The phase before the first counts as over, so that nothing is waited for.
        ({"PHASE": 1}, "still to write"),
        ({"PHASE": 2}, "neither 0 nor 1"),
        ({"AGAIN": True, "MEET": False}, "that was read since the last program_barrier"),
    ],
)
def test_what_would_hang_or_race_is_an_error(faults: dict[str, Any], said: str) -> None:
    with pytest.raises(HazardError, match=said):
        copy_box(**faults)


def test_a_copy_that_nobody_waits_for_is_an_error() -> None:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)
    descriptor = TensorDescriptor(PAGES, list(PAGES.shape), list(PAGES.stride()), [1, 4, 16], layout)
    with pytest.raises(HazardError, match="ends with 128 bytes in flight"):
        launch(gluon_kernels.leave_kernel, descriptor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_summed_in_fp32_and_zero_times_nan_is_nan(dtype: torch.dtype) -> None:
    a, b, out = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.empty(16, 8)
    a[3, 5], b[5] = torch.nan, 0.0
    a[:, 7], b[7, 2] = 0.0, torch.inf
    launch(gluon_kernels.multiply_kernel, out, a, b)
    expected = a.float() @ b.float() + 1
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[3].isnan().all()
    assert out[:, 2].isnan().all()


def test_products_of_fp32_are_refused() -> None:
    with pytest.raises(TypeError, match="mma_v2 of fp32"):
        launch(gluon_kernels.multiply_kernel, torch.empty(16, 8), torch.zeros(16, 16), torch.zeros(16, 8))


def reinterpret(num: int, row: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.arange(32, dtype=torch.int16), torch.zeros(num, dtype=torch.int32)
    launch(gluon_kernels.reinterpret_kernel, out, x, NUM=num, ROW=row)
    return out, x.view(torch.int32)


@pytest.mark.parametrize("num", [8, 16])
def test_shared_memory_is_reinterpreted_from_its_first_byte(num: int) -> None:
    out, words = reinterpret(num)
    assert torch.equal(out, words[:num])


def test_shared_memory_that_does_not_fit_or_lies_apart_is_not_reinterpreted() -> None:
    with pytest.raises(HazardError, match="64 bytes of shared memory are reinterpreted as int32"):
        reinterpret(32)
    with pytest.raises(TypeError, match="does not lie in one piece"):
        reinterpret(4, row=4)


def test_a_last_axis_of_two_is_split() -> None:
    x, out = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    launch(gluon_kernels.split_kernel, out, x)
    assert out.tolist() == [*range(1, 16, 2), *range(0, 16, 2)]
    with pytest.raises(TypeError, match="its last axis is not 2"):
        values([1, 2, 3], tl.int32).split()


def test_a_tensor_tells_its_type() -> None:
    layout = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    assert Value(np.zeros((2, 3), np.int32), tl.int32, layout).type == (tl.int32, [2, 3], layout)


def test_pointers_and_values_are_read_as_other_types() -> None:
    out = torch.empty(256)
    launch(gluon_kernels.bitcast_kernel, out, ALL_BYTES.view(torch.int32))
    torch.testing.assert_close(out, ALL_BYTES.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


def holds_nan(values: torch.Tensor) -> torch.Tensor:
    """Of each value alone, at a place of its own among zeros."""
    words = torch.zeros(len(values), 16 // values.element_size(), dtype=values.dtype)
    words[torch.arange(len(values)), torch.arange(len(values)) % words.shape[1]] = values
    out = torch.zeros(len(values), dtype=torch.int32)
    choices = {"FP8": values.element_size() == 1, "BF16": values.dtype == torch.bfloat16}
    launch(gluon_kernels.holds_nan_kernel, out, words.view(torch.int32), grid=(len(values),), **choices)
    return out.bool()


def test_sums_that_wrap_find_nan() -> None:
    assert torch.equal(holds_nan(ALL_BYTES.view(torch.float8_e4m3fn)), ALL_BYTES.view(torch.float8_e4m3fn).float().isnan())
    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny, torch.inf, -torch.inf, torch.nan]
        )
        assert torch.equal(holds_nan(numbers.to(dtype)), ~numbers.isfinite())


@pytest.mark.parametrize("row", [-(2**31) + 64, 0, 64, 65, 66, 95, 127, 128, 129, 2**31 - 1])
def test_ones_end_before_a_row(row: int) -> None:
    """Of the tile of rows 64 to 127, however far away the row is."""
    out = torch.zeros(64, dtype=torch.int16)
    launch(gluon_kernels.ones_kernel, out, row, 1, TILE=64)
    assert out.tolist() == [-1 if i < row else 0 for i in range(64, 128)]


def test_reductions_and_scans() -> None:
    x, out = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0]), torch.zeros(24)
    launch(gluon_kernels.reduce_kernel, out, x)
    assert out[:3].tolist() == [9.0, -5.0, 19.0]
    assert torch.equal(out[8:16], x.cumsum(0))
    assert torch.equal(out[16:], x.flip(0).cumsum(0).flip(0))


def test_a_maximum_drops_nan_as_triton_does_and_a_sum_keeps_it() -> None:
    x, out = torch.tensor([3.0, torch.nan, *[1.0] * 6]), torch.zeros(24)
    launch(gluon_kernels.reduce_kernel, out, x)
    assert out[:2].tolist() == [3.0, 1.0]
    assert out[2].isnan()


def arrivals(order: Order) -> list[int]:
    seen, counter = torch.full((12,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch(gluon_kernels.arrive_kernel, seen, counter, grid=(3, 4), order=order)
    assert counter.item() == 0
    return seen.tolist()


def test_programs_run_in_the_order_asked_for() -> None:
    assert arrivals("ascending") == list(range(12))
    assert arrivals("descending") == list(range(12))[::-1]
    assert sorted(arrivals(5)) == list(range(12))
    assert arrivals(5) == arrivals(5) != arrivals(6)


def test_loops_of_either_kind() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    launch(gluon_kernels.walk_kernel, out, 7, grid=(2,))
    assert out.tolist() == [sum(sum(range(i)) for i in range(first, 7, 2)) for first in (0, 1)]
