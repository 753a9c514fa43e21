"""An interpreter that runs Gluon kernels on a CPU, program by program: Triton's own does not know Gluon.

A launch runs the Python functions behind `@gluon.jit` on NumPy: copies of them, whose globals hold the vocabulary of `gluon_language` in place of Gluon's. So
any kernel that is written in it is run, mutated copies included. Memory is read and written by address and watched, as in Triton's interpreter; shared
memory and the copies into it are as hostile as hardware may be (`gluon_memory`).

Programs run one after another, in an order that the caller chooses: nothing may depend on it.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction

from atoll.ops.attention import gluon_decode_sm90
from atoll.probe.gluon_language import Namespace, Program, is_plain, stand_ins, tensor_range
from atoll.probe.gluon_memory import DTYPES, Descriptor
from atoll.probe.gluon_values import NotInterpretedError, Value, as_value

Order = Literal["ascending", "descending"] | int  # a number seeds a shuffle

# How a launch is made, which is nothing to an interpreter.
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid")


@contextmanager
def gluon_interpreted(order: Order = 0) -> Iterator[None]:
    """Run launches of Gluon kernels here meanwhile; the Hopper backend then takes a CPU for its device."""

    def run(kernel: GluonJITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch(kernel, grid, args, kwargs, order)

    originals = GluonJITFunction.run, gluon_decode_sm90.runs_on
    GluonJITFunction.run, gluon_decode_sm90.runs_on = run, _is_cpu
    try:
        yield
    finally:
        GluonJITFunction.run, gluon_decode_sm90.runs_on = originals


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def launch(kernel: GluonJITFunction, grid: Any, args: Sequence[Any], kwargs: dict[str, Any], order: Order = 0) -> None:
    """Run every program of a grid."""
    named = {name: value for name, value in kwargs.items() if name not in _LAUNCH_OPTIONS or name in inspect.signature(kernel.fn).parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **named)
    bound.apply_defaults()
    given = {p.name: bound.arguments[p.name] if p.is_constexpr else _argument(bound.arguments[p.name], not p.do_not_specialize) for p in kernel.params}
    sizes = tuple(int(size) for size in (grid(bound.arguments) if callable(grid) else grid))
    sizes += (1,) * (3 - len(sizes))
    program = Program(sizes, kwargs.get("num_warps", 4))
    function = _Copies(stand_ins(program)).function(kernel)
    # NaN and Inf are the point here, and NumPy would warn of each.
    with np.errstate(all="ignore"):
        for ids in _ordered(list(np.ndindex(sizes)), order):
            program.start(ids)
            function(**given)
            program.shared.close()


def _ordered(programs: list[tuple[int, ...]], order: Order) -> list[tuple[int, ...]]:
    if isinstance(order, int):
        return [programs[i] for i in np.random.default_rng(order).permutation(len(programs))]
    return programs if order == "ascending" else programs[::-1]


def _argument(value: Any, specialize: bool) -> Any:
    """What a kernel sees of an argument: a pointer, a descriptor, a scalar; None, and 1 where Triton specializes, are constants."""
    if value is None or (specialize and type(value) is int and value == 1):
        return value
    if isinstance(value, torch.Tensor):
        return Value(np.int64(value.data_ptr()), tl.pointer_type(DTYPES[value.dtype]))
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, (bool, int, float)):
        return as_value(value)
    raise NotInterpretedError(f"an argument of type {type(value).__name__} is not interpreted")


class _Copies:
    """Copies of jit functions that run as Python, whose globals hold the stand-ins; for one launch."""

    def __init__(self, known: dict[int, Any]) -> None:
        self._known = known  # by the id of what is replaced
        self._globals: dict[int, dict[str, Any]] = {}

    def function(self, jitted: GluonJITFunction) -> Callable[..., Any]:
        original = jitted.fn
        closure = tuple(types.CellType(self._stand_in(cell.cell_contents)) for cell in original.__closure__ or ())
        return types.FunctionType(original.__code__, self._copied(original.__globals__), original.__name__, original.__defaults__, closure)

    def _copied(self, module: dict[str, Any]) -> dict[str, Any]:
        if id(module) not in self._globals:
            self._globals[id(module)] = copied = {"range": tensor_range}
            copied.update((name, self._stand_in(value)) for name, value in module.items())
        return self._globals[id(module)]

    def _stand_in(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, GluonJITFunction):
            return self.function(value)
        if isinstance(value, ConstexprFunction):
            return value.fn
        if isinstance(value, tl.constexpr):
            return value.value
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and home.split(".")[0] == "triton" and not is_plain(value):
            return Namespace(getattr(value, "__name__", repr(value)), {})
        return value
