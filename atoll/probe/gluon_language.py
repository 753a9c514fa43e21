"""The vocabulary of Gluon kernels, as an interpreted program speaks it: `gl`, `mbarrier`, `tma` and what stands beside them, on NumPy.

Anything else is a NotInterpretedError that names it, so that nothing is guessed.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as addressed
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from atoll.probe.gluon_asm import inline_asm
from atoll.probe.gluon_memory import Descriptor, HazardError, SharedMemory, SharedSpace, check_lanes
from atoll.probe.gluon_values import NotInterpretedError, Value, as_value, binary, bits_of, from_bits, hostile_bits, unary, where
from atoll.probe.watch import watch


class Namespace:
    """Names of a module, and an error for any other; without names, a stand-in for what is not known at all."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.__dict__.update(members, _name=name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NotInterpretedError(f"{self._name}.{attribute} is not interpreted")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotInterpretedError(f"{self._name} is not interpreted")


class PendingProduct(Value):
    """What `warpgroup_mma` gives before it is waited for: no value yet, but the sum that another one adds to."""

    __slots__ = ("result",)

    def __init__(self, result: Value) -> None:
        self.result, self.dtype, self.layout = result, result.dtype, result.layout

    def __repr__(self) -> str:
        return f"PendingProduct({self.dtype})"

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        raise HazardError("a product in flight is used as a value; warpgroup_mma_wait returns it")


class Program:
    """One program at a time: which it is, and its shared memory."""

    def __init__(self, sizes: tuple[int, ...], num_warps: int = 4) -> None:
        self.sizes = sizes
        self.num_threads = 32 * num_warps
        self.start((0,) * len(sizes))

    def start(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.shared = SharedSpace()

    def program_id(self, axis: int) -> Value:
        return as_value(self.ids[axis])

    def num_programs(self, axis: int) -> Value:
        return as_value(self.sizes[axis])

    def allocate(self, element_ty: tl.dtype, shape: Sequence[int], layout: Any, value: Value | None = None) -> SharedMemory:
        return self.shared.allocate(element_ty, shape, layout, value)

    def meet(self) -> None:
        self.shared.meet()

    def init(self, bar: SharedMemory, count: int) -> None:
        self.shared.init(bar, count)

    def expect(self, bar: SharedMemory, bytes: int, pred: Any = True) -> None:
        if pred:
            self.shared.barrier(bar).expect(bytes)

    def arrive(self, bar: SharedMemory, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.shared.barrier(bar).arrive(count)

    def wait(self, bar: SharedMemory, phase: Any, pred: Any = True, deps: Sequence[SharedMemory] = ()) -> None:
        if pred:
            self.shared.barrier(bar).wait(as_value(phase).__index__())

    def copy_to_shared(self, desc: Descriptor, coord: Sequence[Any], barrier: SharedMemory, result: SharedMemory, pred: Any = True) -> None:
        if pred:
            self.shared.copy(desc, [as_value(at).__index__() for at in coord], barrier, result)

    def copy_lanes_to_shared(self, smem: SharedMemory, pointer: Value, mask: Any = None) -> None:
        if mask is not None:
            raise NotInterpretedError("a masked async_copy_global_to_shared is not interpreted: what it leaves in shared memory is unknown")
        if pointer.dtype.element_ty != smem.dtype or list(pointer.data.shape) != smem.shape:
            raise TypeError(f"{smem.dtype} {smem.shape} of shared memory are copied from {pointer.dtype} {list(pointer.data.shape)}")
        check_lanes(pointer)
        self.shared.copy_lanes(smem, bits_of(_load(pointer)))

    def arrive_after_lane_copies(self, mbarrier: SharedMemory, increment_count: bool = True) -> None:
        if increment_count:
            raise NotInterpretedError("async_copy.mbarrier_arrive that counts itself is not interpreted: only increment_count=False is")
        self.shared.arrive_after_lane_copies(mbarrier, self.num_threads)

    def fence_async_shared(self, cluster: bool = False) -> None:
        self.shared.fence()

    def warpgroup_mma(
        self,
        a: Value | SharedMemory,
        b: SharedMemory,
        acc: Value,
        *,
        use_acc: Any = True,
        precision: Any = None,
        max_num_imprecise_acc: Any = None,
        is_async: bool = False,
    ) -> Value:
        if not isinstance(b, SharedMemory):
            raise TypeError("warpgroup_mma takes its second operand from shared memory")
        b_a, b_b = self.shared.multiply(a) if isinstance(a, SharedMemory) else a, self.shared.multiply(b)
        b_acc = acc.result if isinstance(acc, PendingProduct) else acc
        pending = PendingProduct(_multiply_add("warpgroup_mma", b_a, b_b, b_acc if use_acc else _zeros_like(b_acc)))
        return pending if is_async else self.warpgroup_mma_wait(deps=[pending])

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: Sequence[Value] | None = None) -> Any:
        """The products waited for: one, or a tuple."""
        if num_outstanding:
            raise NotInterpretedError(f"warpgroup_mma_wait({num_outstanding}) is not interpreted: only that for all products is")
        if not deps:
            raise TypeError("warpgroup_mma_wait returns what it is given as deps")
        self.shared.end_products()
        results = tuple(dep.result if isinstance(dep, PendingProduct) else dep for dep in deps)
        return results if len(results) > 1 else results[0]


def stand_ins(program: Program) -> dict[int, Any]:
    """What a program finds in place of Gluon's names, by the id of the original."""
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    mbarrier = {
        "MBarrierLayout": hopper.mbarrier.MBarrierLayout,
        "init": program.init,
        "expect": program.expect,
        "arrive": program.arrive,
        "wait": program.wait,
    }
    language = _LANGUAGE | {
        "program_id": program.program_id,
        "num_programs": program.num_programs,
        "allocate_shared_memory": program.allocate,
        "barrier": program.meet,
        "thread_barrier": program.meet,
    }
    return {
        id(gl): Namespace("gl", language),
        id(hopper.mbarrier): Namespace("mbarrier", mbarrier),
        id(hopper.tma): Namespace("tma", {"async_copy_global_to_shared": program.copy_to_shared}),
        id(async_copy): Namespace(
            "async_copy", {"async_copy_global_to_shared": program.copy_lanes_to_shared, "mbarrier_arrive": program.arrive_after_lane_copies}
        ),
        id(hopper.mma_v2): _mma_v2,
        id(hopper.fence_async_shared): program.fence_async_shared,
        id(hopper.warpgroup_mma): program.warpgroup_mma,
        id(hopper.warpgroup_mma_wait): program.warpgroup_mma_wait,
        id(barrier): program.meet,
    }


def is_plain(value: Any) -> bool:
    """Dtypes and layouts, which mean here what they mean there."""
    return isinstance(value, tl.dtype) or (isinstance(value, type) and (value.__name__.endswith("Layout") or value is tl.pointer_type))


def tensor_range(*bounds: Any) -> Iterator[Value]:
    """`range` in a kernel, whose counter is a scalar."""
    return (as_value(i) for i in range(*bounds))


def _load(pointer: Value, mask: Any = None, other: Any = None, cache_modifier: str = "", eviction_policy: str = "", volatile: bool = False) -> Value:
    dtype = pointer.dtype.element_ty
    addresses, lanes = _lanes(pointer, mask, "load")
    # Without `other`, lanes that the mask hides hold anything.
    hidden = hostile_bits(pointer.shape, dtype) if other is None else bits_of(as_value(other).to(dtype))
    bits = addressed.load(addresses, lanes, _flat(hidden, pointer), hidden.dtype)
    return from_bits(bits.reshape(pointer.data.shape), dtype, pointer.layout)


def _store(pointer: Value, value: Any, mask: Any = None, cache_modifier: str = "", eviction_policy: str = "") -> None:
    addresses, lanes = _lanes(pointer, mask, "store")
    bits = bits_of(as_value(value).to(pointer.dtype.element_ty))
    addressed.store(addresses, _flat(bits, pointer), lanes)


def _atomic_add(pointer: Value, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
    """Returns what was there; lane after lane, since several may name one address."""
    dtype = pointer.dtype.element_ty
    if dtype not in (tl.int32, tl.float32):
        raise NotInterpretedError(f"an atomic_add of {dtype} is not interpreted")
    added = np.broadcast_to(as_value(val).to(dtype).data, pointer.shape)
    old = from_bits(hostile_bits(pointer.shape, dtype), dtype, pointer.layout)
    _, lanes = _lanes(pointer, mask, "atomic")
    for i, at in enumerate(np.ndindex(*pointer.shape)):
        if lanes[i]:
            here = Value(pointer.data[at], pointer.dtype)
            old.data[at] = _load(here).data
            _store(here, Value(old.data[at] + added[at], dtype))
    return old


def _lanes(pointer: Value, mask: Any, access: str) -> tuple[np.ndarray, np.ndarray]:
    """Flat addresses, and which of them may be touched."""
    if not pointer.dtype.is_ptr():
        raise TypeError(f"{access} of {pointer.dtype}, which is no pointer")
    addresses = np.ascontiguousarray(pointer.data).ravel().view(np.uint64)
    lanes = np.ones(addresses.shape, bool) if mask is None else _flat(as_value(mask).data, pointer)
    return addresses, watch.keep_inside(addresses, lanes, access)


def _flat(data: np.ndarray, pointer: Value) -> np.ndarray:
    """One for each address."""
    return (data if data.shape == pointer.data.shape else np.broadcast_to(data, pointer.data.shape)).ravel()


def _hint(value: Value, of: Any) -> Value:
    """What a kernel promises of a value; a copy that relies on it is checked itself."""
    return value


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(np.arange(start, end, dtype=np.int32), tl.int32, layout)


def _full(shape: Sequence[int], value: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    return Value(np.broadcast_to(as_value(value).to(dtype).data, tuple(shape)), dtype, layout)


def _zeros(shape: Sequence[int], dtype: tl.dtype, layout: Any = None) -> Value:
    return _full(shape, 0, dtype, layout)


def _zeros_like(input: Value) -> Value:
    return _full(input.shape, 0, input.dtype, input.layout)


def _convert_layout(value: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(value.data, value.dtype, layout)


def _expand_dims(input: Value, axis: int) -> Value:
    layout = input.layout
    return Value(np.expand_dims(input.data, axis), input.dtype, layout.parent if isinstance(layout, gl.SliceLayout) and layout.dim == axis else None)


def _maximum(x: Any, y: Any) -> Value:
    # Of a NaN and a number, the number: Triton's default.
    return binary(np.fmax, x, y)


def _minimum(x: Any, y: Any) -> Value:
    return binary(np.fmin, x, y)


def _extreme(operation: np.ufunc) -> Callable[..., Value]:
    def reduce(input: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
        wide = input.dtype if input.dtype.primitive_bitwidth >= 32 else tl.float32 if input.dtype.is_floating() else tl.int32
        return Value(operation.reduce(input.to(wide).data, axis=axis, keepdims=keep_dims), wide)

    return reduce


def _sum(input: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    dtype = tl.int32 if input.dtype.is_int() and input.dtype.int_bitwidth < 32 else input.dtype
    if dtype.primitive_bitwidth < 32:
        raise NotInterpretedError(f"a sum of {dtype} is not interpreted")
    data = input.to(dtype).data
    return Value(np.sum(data, axis=axis, keepdims=keep_dims, dtype=data.dtype), dtype)


def _reduce(input: Any, axis: int, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    scanned = _associative_scan(input, axis, combine_fn)
    values = scanned if isinstance(scanned, tuple) else (scanned,)
    last = tuple(Value(np.take(v.data, [-1] if keep_dims else -1, axis), v.dtype) for v in values)
    return last if isinstance(scanned, tuple) else last[0]


def _associative_scan(input: Any, axis: int, combine_fn: Callable[..., Any], reverse: bool = False) -> Any:
    values = input if isinstance(input, tuple) else (input,)
    num = values[0].data.shape[axis]
    parts = [tuple(Value(np.take(v.data, i, axis), v.dtype) for v in values) for i in (range(num)[::-1] if reverse else range(num))]

    def combine(x: tuple[Value, ...], y: tuple[Value, ...]) -> tuple[Value, ...]:
        combined = combine_fn(*x, *y)
        return combined if isinstance(combined, tuple) else (combined,)

    steps = list(itertools.accumulate(parts, combine))[:: -1 if reverse else 1]
    results = tuple(Value(np.stack([step[i].data for step in steps], axis), v.dtype, v.layout) for i, v in enumerate(values))
    return results if isinstance(input, tuple) else results[0]


def _abs(x: Any) -> Value:
    value = as_value(x)
    return Value(np.abs(value.data), value.dtype, value.layout)


def _mma_v2(a: Value, b: Value, acc: Value, input_precision: Any = None) -> Value:
    return _multiply_add("mma_v2", a, b, acc)


def _multiply_add(name: str, a: Value, b: Value, acc: Value) -> Value:
    if a.dtype != b.dtype or a.dtype not in (tl.float16, tl.bfloat16) or acc.dtype != tl.float32:
        raise TypeError(f"{name} of {a.dtype}, {b.dtype} and {acc.dtype} is not interpreted: two of fp16 or bf16 and fp32 are")
    product = a.data.astype(np.float32) @ b.data.astype(np.float32)
    if product.shape != acc.data.shape:
        raise TypeError(f"{name} of {a.shape} and {b.shape} does not give {acc.shape}")
    return Value(acc.data + product, tl.float32, acc.layout)


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(f"static_assert: {message}")


_LANGUAGE: dict[str, Any] = {name: value for name, value in vars(gl).items() if is_plain(value)} | {
    "constexpr": lambda value: value,
    "static_range": range,
    "static_assert": _static_assert,
    "to_tensor": as_value,
    "arange": _arange,
    "full": _full,
    "zeros": _zeros,
    "zeros_like": _zeros_like,
    "convert_layout": _convert_layout,
    "expand_dims": _expand_dims,
    "permute": lambda input, *order: input.permute(*order),
    "reshape": lambda input, *shape: input.reshape(*shape),
    "split": lambda input: input.split(),
    "cast": lambda input, dtype, bitcast=False: as_value(input).to(dtype, bitcast),
    "load": _load,
    "store": _store,
    "atomic_add": _atomic_add,
    "where": where,
    "maximum": _maximum,
    "minimum": _minimum,
    "multiple_of": _hint,
    "max_contiguous": _hint,
    "cdiv": lambda x, div: (x + div - 1) // div,
    "abs": _abs,
    "exp": functools.partial(unary, np.exp),
    "exp2": functools.partial(unary, np.exp2),
    "log": functools.partial(unary, np.log),
    "log2": functools.partial(unary, np.log2),
    "sqrt": functools.partial(unary, np.sqrt),
    "ceil": functools.partial(unary, np.ceil),
    "floor": functools.partial(unary, np.floor),
    "max": _extreme(np.fmax),
    "min": _extreme(np.fmin),
    "sum": _sum,
    "reduce": _reduce,
    "associative_scan": _associative_scan,
    "inline_asm_elementwise": inline_asm,
}
