"""Scalars and tensors of an interpreted Gluon kernel: NumPy arrays with Triton's dtypes, promotion and arithmetic.

Layouts mean nothing here but to inline assembly, which packs neighbours: a value remembers the one that it was given.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

from atoll.probe.interpreter import E4M3FN, to_bf16

# What holds a dtype's values, by its name: comparing names is what an interpreter can afford. NumPy has neither bf16 nor fp8: their values lie in fp32, rounded
# after each operation.
_HOLDERS: dict[str, Any] = {
    dtype.name: np.dtype(holder)
    for dtype, holder in (
        (tl.int1, np.bool_),
        (tl.int8, np.int8),
        (tl.int16, np.int16),
        (tl.int32, np.int32),
        (tl.int64, np.int64),
        (tl.uint8, np.uint8),
        (tl.uint16, np.uint16),
        (tl.uint32, np.uint32),
        (tl.uint64, np.uint64),
        (tl.float8e4nv, np.float32),
        (tl.float16, np.float16),
        (tl.bfloat16, np.float32),
        (tl.float32, np.float32),
        (tl.float64, np.float64),
    )
}
_DTYPES = {dtype.name: dtype for dtype in vars(tl).values() if isinstance(dtype, tl.dtype) and dtype.name in _HOLDERS}
_FP8, _BF16, _INT1 = tl.float8e4nv.name, tl.bfloat16.name, tl.int1.name
_BITS: dict[int, Any] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


class NotInterpretedError(NotImplementedError):
    """An operation whose meaning the interpreter does not know."""


class TensorType(NamedTuple):
    """What a kernel may ask of a tensor's type; the layout is None where it is not followed."""

    element_ty: tl.dtype
    shape: list[int]
    layout: Any


class Value:
    """An immutable scalar (no dimensions) or tensor. Pointers are addresses, int64."""

    __slots__ = ("data", "dtype", "layout")

    # NumPy's scalars leave the operation to us.
    __array_ufunc__ = None

    def __init__(self, data: Any, dtype: tl.dtype, layout: Any = None) -> None:
        self.data = np.asarray(data)
        self.dtype = dtype
        self.layout = layout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotInterpretedError(f"tensor.{name} is not interpreted")

    def __repr__(self) -> str:
        return f"Value({self.data}, {self.dtype})"

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape, self.layout)

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise TypeError(f"a tensor of shape {self.shape} is no condition; reduce it first")
        return bool(self.data)

    def __index__(self) -> int:
        if self.data.ndim or not self.dtype.is_int():
            raise TypeError(f"{self!r} is no integer scalar")
        return int(self.data)

    def __getitem__(self, key: Any) -> "Value":
        keys = key if isinstance(key, tuple) else (key,)
        if any(k is not None and k != slice(None) for k in keys):
            raise NotInterpretedError(f"tensor[{key}] is not interpreted: only None and : are")
        return Value(self.data[keys], self.dtype)

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> "Value":
        if bitcast and self.dtype.is_ptr() and dtype.is_ptr():
            return Value(self.data, dtype, self.layout)
        if bitcast:
            return from_bits(bits_of(self), dtype, self.layout)
        return self if dtype.name == self.dtype.name else Value(_convert(self.data, self.dtype, dtype), dtype, self.layout)

    def permute(self, *order: Any) -> "Value":
        return Value(self.data.transpose(_sizes(order)), self.dtype)

    def reshape(self, *shape: Any) -> "Value":
        return Value(self.data.reshape(_sizes(shape)), self.dtype)

    def split(self) -> tuple["Value", "Value"]:
        if self.shape[-1:] != [2]:
            raise TypeError(f"a tensor of shape {self.shape} is not split: its last axis is not 2")
        return Value(self.data[..., 0], self.dtype), Value(self.data[..., 1], self.dtype)

    def __add__(self, other: Any) -> "Value":
        return add(self, other)

    def __radd__(self, other: Any) -> "Value":
        return add(other, self)

    def __sub__(self, other: Any) -> "Value":
        return add(self, -as_value(other)) if self.dtype.is_ptr() else binary(np.subtract, self, other)

    def __rsub__(self, other: Any) -> "Value":
        return binary(np.subtract, other, self)

    def __mul__(self, other: Any) -> "Value":
        return binary(np.multiply, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Value":
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> "Value":
        return _divide(other, self)

    def __floordiv__(self, other: Any) -> "Value":
        return binary(_quotient, self, other, division=True)

    def __rfloordiv__(self, other: Any) -> "Value":
        return binary(_quotient, other, self, division=True)

    def __mod__(self, other: Any) -> "Value":
        return binary(_remainder, self, other, division=True)

    def __rmod__(self, other: Any) -> "Value":
        return binary(_remainder, other, self, division=True)

    def __and__(self, other: Any) -> "Value":
        return binary(np.bitwise_and, self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> "Value":
        return binary(np.bitwise_or, self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> "Value":
        return binary(np.bitwise_xor, self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> "Value":
        return binary(np.left_shift, self, other)

    def __rshift__(self, other: Any) -> "Value":
        return binary(np.right_shift, self, other)

    def __neg__(self) -> "Value":
        return Value(-self.data, self.dtype, self.layout)

    def __invert__(self) -> "Value":
        return Value(~self.data, self.dtype, self.layout)

    def __lt__(self, other: Any) -> "Value":
        return binary(np.less, self, other, gives=tl.int1)

    def __le__(self, other: Any) -> "Value":
        return binary(np.less_equal, self, other, gives=tl.int1)

    def __gt__(self, other: Any) -> "Value":
        return binary(np.greater, self, other, gives=tl.int1)

    def __ge__(self, other: Any) -> "Value":
        return binary(np.greater_equal, self, other, gives=tl.int1)

    def __eq__(self, other: Any) -> "Value":  # type: ignore[override]
        return binary(np.equal, self, other, gives=tl.int1)

    def __ne__(self, other: Any) -> "Value":  # type: ignore[override]
        return binary(np.not_equal, self, other, gives=tl.int1)

    __hash__ = None  # type: ignore[assignment]


def as_value(x: Any) -> Value:
    """A value as it is; a number of Python as Triton makes a constant of it."""
    return x if isinstance(x, Value) else Value(np.asarray(x, _HOLDERS[_constant_dtype(x).name]), _constant_dtype(x))


def promote(x: Any, y: Any, division: bool = False) -> tuple[np.ndarray, np.ndarray, tl.dtype, Any]:
    """Both operands in the dtype that Triton computes in, that dtype, and the layout of the result."""
    x_number, y_number = not isinstance(x, Value), not isinstance(y, Value)
    x_dtype = _constant_dtype(x) if x_number else x.dtype
    y_dtype = _constant_dtype(y) if y_number else y.dtype
    dtype = _computation_dtype(x_dtype.name, x_number, y_dtype.name, y_number, division)
    x_data = np.asarray(x, _HOLDERS[dtype.name]) if x_number else _convert(x.data, x_dtype, dtype)
    y_data = np.asarray(y, _HOLDERS[dtype.name]) if y_number else _convert(y.data, y_dtype, dtype)
    check_ranks(x_data, y_data)
    return x_data, y_data, dtype, (None if x_number else x.layout) or (None if y_number else y.layout)


def binary(operation: Callable[..., Any], x: Any, y: Any, *, division: bool = False, gives: tl.dtype | None = None) -> Value:
    """An elementwise operation of two operands."""
    x_data, y_data, dtype, layout = promote(x, y, division)
    result = operation(x_data, y_data)
    return Value(result if gives is not None else _round(result, dtype), gives or dtype, layout)


def add(x: Any, y: Any) -> Value:
    """A sum; of a pointer and a count of elements, the address so many elements on."""
    if isinstance(y, Value) and y.dtype.is_ptr():
        x, y = y, x
    if not (isinstance(x, Value) and x.dtype.is_ptr()):
        return binary(np.add, x, y)
    offset = as_value(y)
    if not offset.dtype.is_int():
        raise TypeError(f"a pointer and {offset.dtype} are not added")
    check_ranks(x.data, offset.data)
    return Value(x.data + offset.data.astype(np.int64) * (x.dtype.element_ty.primitive_bitwidth // 8), x.dtype, x.layout or offset.layout)


def where(condition: Any, x: Any, y: Any) -> Value:
    x_data, y_data, dtype, layout = promote(x, y)
    chosen = as_value(condition).data.astype(bool)
    for data in (x_data, y_data):
        check_ranks(chosen, data)
    return Value(np.where(chosen, x_data, y_data), dtype, layout or getattr(condition, "layout", None))


def unary(operation: Callable[..., Any], x: Any) -> Value:
    """An elementwise function that Triton has for fp32 and fp64 alone."""
    value = as_value(x)
    if value.dtype not in (tl.float32, tl.float64):
        raise TypeError(f"{operation.__name__} takes fp32 or fp64, not {value.dtype}")
    return Value(operation(value.data), value.dtype, value.layout)


def bits_of(value: Value) -> np.ndarray:
    """The bits as unsigned integers of the dtype's width; contiguous."""
    data, dtype = value.data, value.dtype
    if dtype.name == _BF16:
        return to_bf16(data).reshape(data.shape)
    if dtype.name == _FP8:
        raise NotInterpretedError("writing fp8 is not interpreted")
    return np.ascontiguousarray(data).reshape(data.shape).view(_bits_holder(dtype))


def from_bits(bits: np.ndarray, dtype: tl.dtype, layout: Any = None) -> Value:
    """The values that bits of the dtype's width stand for."""
    if bits.dtype != _bits_holder(dtype):
        raise TypeError(f"{bits.dtype} are not the bits of {dtype}")
    if dtype.name == _BF16:
        return Value((bits.astype(np.uint32) << 16).view(np.float32), dtype, layout)
    if dtype.name == _FP8:
        return Value(E4M3FN[bits], dtype, layout)
    return Value(bits.view(_HOLDERS[dtype.name]), dtype, layout)


def hostile_bits(shape: Sequence[int], dtype: tl.dtype) -> np.ndarray:
    """What memory holds that nobody has written: NaN, read as fp8, fp16, bf16 or fp32."""
    holder = _bits_holder(dtype)
    return np.full(tuple(shape), np.iinfo(holder).max, holder)


def check_ranks(x: np.ndarray, y: np.ndarray) -> None:
    if x.ndim and y.ndim and x.ndim != y.ndim:
        raise TypeError(f"shapes {x.shape} and {y.shape} are of two ranks; expand one")


def _bits_holder(dtype: tl.dtype) -> Any:
    return _BITS[8] if dtype.name == _INT1 else _BITS[dtype.primitive_bitwidth]


def _constant_dtype(number: Any) -> tl.dtype:
    if isinstance(number, bool):
        return tl.int1
    if isinstance(number, int):
        return tl.int32 if -(2**31) <= number < 2**31 else tl.int64
    if isinstance(number, float):
        return tl.float32
    raise TypeError(f"{number!r} of type {type(number).__name__} is no operand")


@functools.cache
def _computation_dtype(x: str, x_number: bool, y: str, y_number: bool, division: bool) -> tl.dtype:
    if x not in _DTYPES or y not in _DTYPES:
        raise NotInterpretedError(f"arithmetic of {x} and {y} is not interpreted")
    return TritonSemantic(None).computation_type_impl(_DTYPES[x], x_number, _DTYPES[y], y_number, division)


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    if source.name == target.name:
        return data
    if source.is_ptr() and target.name == tl.int64.name:
        return data
    if source.is_ptr() or target.is_ptr() or target.name == _FP8:
        raise NotInterpretedError(f"a conversion of {source} to {target} is not interpreted")
    if target.name == _INT1:
        return data != 0
    if source.is_floating() and target.is_int():
        if target.primitive_bitwidth > 32:
            raise NotInterpretedError(f"a conversion of {source} to {target} is not interpreted")
        # Towards zero, to the nearest that there is, NaN to 0.
        limits = np.iinfo(_HOLDERS[target.name])
        whole = np.nan_to_num(np.trunc(data.astype(np.float64)), nan=0.0)
        return np.clip(whole, limits.min, limits.max).astype(_HOLDERS[target.name])
    return _round(data, target)


def _round(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """In the holder of a dtype, as a value that the dtype has."""
    if dtype.name == _BF16:
        wide = np.asarray(data, np.float32)
        return (to_bf16(wide).astype(np.uint32) << 16).view(np.float32).reshape(wide.shape)
    holder = _HOLDERS[dtype.name]
    return data if data.dtype is holder else data.astype(holder)


def _divide(x: Any, y: Any) -> Value:
    x, y = (v.to(tl.float32) if isinstance(v, Value) and v.dtype.is_int() else v for v in (x, y))
    return binary(np.divide, x, y, division=True)


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """As C divides: towards zero."""
    if x.dtype.kind == "f":
        raise TypeError("// takes integers")
    if not np.all(y):
        raise ZeroDivisionError("an integer is divided by zero")
    floor = np.floor_divide(x, y)
    return floor + ((floor < 0) & (floor * y != x))


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """As C's, with the sign of the dividend."""
    return np.fmod(x, y) if x.dtype.kind == "f" else x - _quotient(x, y) * y


def _sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape or an order, given one by one or as a sequence."""
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else given
