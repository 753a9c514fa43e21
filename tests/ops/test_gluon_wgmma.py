"""Products by wgmma in our interpreter of Gluon: right, as late as their wait, and each hazard about them seen."""

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atoll.probe.gluon_interpreter import gluon_interpreted
from atoll.probe.gluon_memory import HazardError
from atoll.probe.gluon_values import NotInterpretedError
from tests.ops import gluon_kernels


def wgmma(dtype: torch.dtype = torch.bfloat16, *, shared: bool = True, is_async: bool = True, fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    a, b, out = torch.randn(64, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.empty(64, 8)
    with gluon_interpreted():
        gluon_kernels.wgmma_kernel[(1,)](out, a, b, SHARED=shared, ASYNC=is_async, FAULT=fault, num_warps=4)
    return out, 2 * (a.float() @ b.float().T) + 1


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_warpgroup_multiplies(dtype: torch.dtype, shared: bool, is_async: bool) -> None:
    torch.testing.assert_close(*wgmma(dtype, shared=shared, is_async=is_async))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no fence", "a product of shared memory that threads stored to, with no fence_async_shared since"),
        ("no barrier", "with no program_barrier after the fence since"),
        ("barrier before the fence", "with no program_barrier after the fence since"),
        ("store before the wait", "a store to shared memory that a product in flight may still read"),
        ("use before the wait", "a product in flight is used as a value"),
        ("no wait", "ends with a product in flight"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_what_a_warpgroup_multiplies_too_soon_is_an_error(shared: bool, fault: str, said: str) -> None:
    with pytest.raises(HazardError, match=said):
        wgmma(shared=shared, fault=fault)


def test_waiting_for_some_products_is_not_interpreted() -> None:
    with pytest.raises(NotInterpretedError, match=r"warpgroup_mma_wait\(1\)"):
        wgmma(fault="some outstanding")


def multiply_box(fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    pages, out = torch.randn(2, 64, 16).half(), torch.empty(64, 64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)
    with gluon_interpreted():
        gluon_kernels.multiply_box_kernel[(1,)](out, TensorDescriptor(pages, [2, 64, 16], [1024, 16, 1], [1, 64, 16], layout), FAULT=fault, num_warps=4)
    return out, pages[0].float() @ pages[0].float().T


def test_a_box_is_multiplied_where_it_lies() -> None:
    torch.testing.assert_close(*multiply_box())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("copy over a store", "a copy into shared memory that threads stored to, with no fence_async_shared since"),
        ("no wait for the copy", "a product of shared memory that a copy in flight is still to write"),
        ("copy before the wait", "a copy into shared memory that a product in flight may still read"),
        ("no meeting", "that was read since the last program_barrier"),
    ],
)
def test_a_copy_that_meets_a_product_is_an_error(fault: str, said: str) -> None:
    with pytest.raises(HazardError, match=said):
        multiply_box(fault)
