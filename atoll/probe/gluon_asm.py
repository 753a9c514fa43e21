"""Gluon's inline assembly on a CPU: which elements share a register, and the text run on them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from atoll.probe.gluon_values import NotInterpretedError, Value, as_value, bits_of, from_bits
from atoll.probe.ptx import run_ptx


def inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Elements go `pack` at a time, neighbours along the last axis: into one register, or of 32 bits each into one of its own."""
    values = [as_value(arg) for arg in args]
    for value in values:
        if pack > 1 and not _has_neighbours(value.layout, pack):
            raise NotInterpretedError(f"inline assembly of {pack} packed values of layout {value.layout} is not interpreted: which are neighbours is unknown")
    outputs = run_ptx(asm, constraints, [register for value in values for register in _packed(value, pack)])
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    results = tuple(_unpacked(bits, of, pack, values[0].layout) for bits, of in zip(outputs, dtypes, strict=True))
    return results if isinstance(dtype, tuple) else results[0]


def _has_neighbours(layout: Any, pack: int) -> bool:
    """Whether a thread's registers hold `pack` consecutive elements of the last axis."""
    if isinstance(layout, gl.DotOperandLayout):
        # mma.sync's (version 2) and wgmma's (3) alike; there is no operand 1 of wgmma in registers.
        known = isinstance(layout.parent, gl.NVMMADistributedLayout) and layout.parent.version[0] in (2, 3)
        return known and layout.operand_index == 0 and layout.k_width >= pack
    if isinstance(layout, gl.SliceLayout):
        return layout.dim == 0 and _has_neighbours(layout.parent, pack)
    return isinstance(layout, gl.BlockedLayout) and layout.order[0] == layout.rank - 1 and layout.size_per_thread[-1] >= pack


def _packed(value: Value, pack: int) -> list[np.ndarray]:
    bits = bits_of(value)
    if pack == 1:
        return [bits]
    if bits.itemsize == 4:
        return [bits[..., i::pack] for i in range(pack)]
    return [bits.view(f"u{bits.itemsize * pack}")]


def _unpacked(bits: np.ndarray, dtype: tl.dtype, pack: int, layout: Any) -> Value:
    width = dtype.primitive_bitwidth // 8
    if bits.itemsize != width * pack:
        raise TypeError(f"a register of {8 * bits.itemsize} bits does not hold {pack} of {dtype}")
    return from_bits(np.ascontiguousarray(bits).view(f"u{width}") if pack > 1 else bits, dtype, layout)
