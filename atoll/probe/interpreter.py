"""Repairs to Triton's CPU interpreter, so that it judges kernels fairly, with the watch on every address that they touch.

Triton 3.6.0's interpreter decodes the e4m3fn bytes 0x7F and 0xFF as 480 and -480, which would hide every leak of an fp8 value (0 * 480 is 0), and
cuts fp32 to bf16 by dropping bits; with NumPy 2.4 it fails at a loop whose bound is computed. The repairs are for these alone; compiled kernels are
not concerned. Gluon kernels, which it does not run, have an interpreter of ours (gluon_interpreter).
"""

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from atoll.ops.quant.bytes import decode_e4m3fn
from atoll.probe.watch import watch, watched

E4M3FN = np.array([decode_e4m3fn(byte) for byte in range(256)], dtype=np.float32)


@functools.cache
def repair_interpreter() -> None:
    """Patch the interpreter of this process, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source == tl.float8e4nv and target in (tl.float16, tl.bfloat16, tl.float32):
            values = E4M3FN[data.view(np.uint8)]
            if target == tl.float16:
                return values.astype(np.float16).view(np.uint16)
            return values.view(np.uint32) if target == tl.float32 else to_bf16(values)
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            return to_bf16(data.view(np.float32))
        return original(data, source, target, rounding_mode)

    interpreter._convert_float = convert
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = watch.keep_inside(ptrs.data, mask.data, "load")
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = watch.keep_inside(ptrs.data, mask.data, "store")
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # A scalar is an array of one element there, of which NumPy makes no int from 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index
    _patch_once_a_launch(interpreter)
    _check_overflow_at_once(interpreter)
    _remember_types(interpreter)
    _share_shapes(tl.core)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Triton puts its stand-ins into `triton.language` at every call of a device function, which takes longer than most of these do: the launch's will do."""
    import triton.language as tl

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # modules, in the launch that runs

    def patch_what_is_new(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if seen and seen <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_what_is_new, launch_anew


def _check_overflow_at_once(interpreter: Any) -> None:
    """Triton works out whether a sum, a difference or a product of integers overflows in ten operations of its own, and then tells nobody."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    class Semantic(interpreter.TritonSemantic):
        def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
            scalar = lhs.type.scalar
            if scalar.int_bitwidth < 64:
                exact = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
                if exact.min() < scalar.get_int_min_value() or exact.max() > scalar.get_int_max_value():
                    raise OverflowError(f"{binary_op.__name__} leaves the range of {scalar}")

    interpreter.TritonSemantic = Semantic
    # Triton 3.7 has one for all launches, 3.6 makes more.
    interpreter.interpreter_semantic.__class__ = Semantic


def _remember_types(interpreter: Any) -> None:
    """NumPy's type for one of Triton's, which Triton looks up in a table that it makes anew each time."""
    find = interpreter._get_np_dtype
    found: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = get_np_dtype


def _share_shapes(core: Any) -> None:
    """What a block type or a tensor keeps beside its own type is the same for all of one shape; Triton wraps each extent anew for every value."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[object, dict[str, Any]] = {}
    of_tensors: dict[str, dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(core._unwrap_if_constexpr(extent) for extent in shape)
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = dict(vars(self))
        vars(self).update(of_types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[type.name] = dict(vars(self))
        vars(self).update(of_tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


@contextmanager
def interpreted(buffers: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Run a kernel in the repaired interpreter. Raises OutOfRangeError at the end if it touched anything but the storages of `buffers`."""
    repair_interpreter()
    # NaN and Inf are the point here, and NumPy would warn of each.
    with watched(buffers), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN (slice|axis) encountered", category=RuntimeWarning)
        yield


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
