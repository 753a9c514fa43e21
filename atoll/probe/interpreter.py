"""Repairs to Triton's CPU interpreter, so that it judges kernels fairly: NaN in fp8 stays NaN, and bf16 rounds to nearest.

Triton 3.6.0's interpreter decodes the e4m3fn bytes 0x7F and 0xFF as 480 and -480, which would hide every leak of an fp8 value (0 * 480 is 0), and
cuts fp32 to bf16 by dropping bits. The repair replaces its float conversion for these types alone; compiled kernels are not concerned.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from atoll.ops.quant.bytes import decode_e4m3fn

_E4M3FN = np.array([decode_e4m3fn(byte) for byte in range(256)], dtype=np.float32)


@functools.cache
def repair_interpreter() -> None:
    """Patch the interpreter of this process, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source == tl.float8e4nv and target in (tl.float16, tl.bfloat16, tl.float32):
            values = _E4M3FN[data.view(np.uint8)]
            if target == tl.float16:
                return values.astype(np.float16).view(np.uint16)
            return values.view(np.uint32) if target == tl.float32 else _to_bf16(values)
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bf16(data.view(np.float32))
        return original(data, source, target, rounding_mode)

    interpreter._convert_float = convert


@contextmanager
def quiet_arithmetic() -> Iterator[None]:
    """NaN and Inf are the point here; NumPy would warn of each."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN (slice|axis) encountered", category=RuntimeWarning)
        yield


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
