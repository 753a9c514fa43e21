"""What the repaired interpreter of Triton finds: here integers that overflow, which a GPU wraps without a word."""

import pytest
import torch
import triton
import triton.language as tl

from atoll.probe.interpreter import interpreted
from tests.kit.workers import WorkerPool


@triton.jit
def address_kernel(out, page_bytes, WIDE: tl.constexpr, OPERATION: tl.constexpr):
    page_id = tl.load(out)
    if WIDE:
        page_id = page_id.to(tl.int64)
    if OPERATION == "mul":
        address = page_id * page_bytes
    elif OPERATION == "add":
        address = page_id + page_bytes
    else:
        address = -page_id - page_bytes
    tl.store(out + 1, address.to(tl.int32, bitcast=False))


def launch(page_id: int, page_bytes: int, wide: bool, operation: str) -> int:
    out = torch.tensor([page_id, 0], dtype=torch.int32)
    with interpreted([out]):
        address_kernel[(1,)](out, page_bytes, wide, operation)
    return int(out[1])


@pytest.mark.parametrize(("page_id", "operation"), [(3 << 15, "mul"), (2**31 - 2**15, "add"), (2**31 - 2**15, "sub")])
def test_an_overflow_of_32_bits_is_an_error(page_id: int, operation: str, interpreter: WorkerPool) -> None:
    with pytest.raises(Exception, match=f"{operation} leaves the range of int32"):
        interpreter.submit(launch, page_id, 2**16, False, operation).result()
    # Not in 64 bits, nor within 32.
    assert interpreter.submit(launch, page_id, 2**16, True, operation).exception() is None
    assert interpreter.submit(launch, 5, 100, False, operation).result() == {"mul": 500, "add": 105, "sub": -105}[operation]
