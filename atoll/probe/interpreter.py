"""Repairs to Triton's CPU interpreter, so that it judges kernels fairly, and a watch on every address that a kernel touches.

Triton 3.6.0's interpreter decodes the e4m3fn bytes 0x7F and 0xFF as 480 and -480, which would hide every leak of an fp8 value (0 * 480 is 0), and
cuts fp32 to bf16 by dropping bits; with NumPy 2.4 it fails at a loop whose bound is computed. The repairs are for these alone; compiled kernels are
not concerned.

On a GPU a page id of INT_MAX, dereferenced, ends the process, or silently reads somebody's memory. Here the watch finds it: lanes that a mask lets through must
lie within the buffers of the call. Offending lanes are not touched, and the call fails afterwards.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atoll.ops.quant.bytes import decode_e4m3fn

_E4M3FN = np.array([decode_e4m3fn(byte) for byte in range(256)], dtype=np.float32)


class OutOfRangeError(RuntimeError):
    """A kernel touched memory outside the buffers that it was given."""


@dataclass
class _Watch:
    """The address ranges of one call, and how many lanes left them."""

    starts: np.ndarray | None = None  # [n] uint64, ascending
    ends: np.ndarray | None = None
    strays: list[str] = field(default_factory=list)

    def keep_inside(self, addresses: np.ndarray, mask: np.ndarray, access: str) -> np.ndarray:
        """The mask without its stray lanes."""
        if self.starts is None or self.ends is None or not mask.any():
            return mask
        # Nearly always one load stays within one buffer, which two numbers tell.
        chosen = addresses[mask]
        low, high = chosen.min(), chosen.max()
        at = np.searchsorted(self.starts, low, side="right") - 1
        if at >= 0 and high < self.ends[at]:
            return mask
        place = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (place >= 0) & (addresses < self.ends[np.maximum(place, 0)])
        stray = int((mask & ~inside).sum())
        if stray:
            self.strays.append(f"{access} of {stray} lanes")
        return mask & inside


_watch = _Watch()


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
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = _watch.keep_inside(ptrs.data, mask.data, "load")
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = _watch.keep_inside(ptrs.data, mask.data, "store")
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # A scalar is an array of one element there, of which NumPy makes no int from 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index


@contextmanager
def interpreted(buffers: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Run a kernel in the repaired interpreter. Raises OutOfRangeError at the end if it touched anything but the storages of `buffers`."""
    repair_interpreter()
    storages = [buffer.untyped_storage() for buffer in buffers if buffer is not None and buffer.numel()]
    ranges = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
    _watch.starts, _watch.ends = (np.array(bounds, dtype=np.uint64) for bounds in zip(*ranges, strict=True))
    _watch.strays.clear()
    try:
        # NaN and Inf are the point here, and NumPy would warn of each.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="All-NaN (slice|axis) encountered", category=RuntimeWarning)
            yield
    finally:
        _watch.starts = _watch.ends = None
    if _watch.strays:
        raise OutOfRangeError(f"the kernel touched memory outside its buffers: {_watch.strays[0]}, and {len(_watch.strays) - 1} more accesses")


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
