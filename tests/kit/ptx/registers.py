"""Registers of all threads of a program, as bits, and which of them products in flight (wgmma) still use."""

import re
from collections.abc import Iterable

import numpy as np

from tests.kit.ptx.faults import Fault
from tests.kit.ptx.parse import Code, members

# What a type's bits are kept as, and what they are in arithmetic.
BITS: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    **dict.fromkeys(("b8", "u8"), np.uint8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), np.uint16),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), np.uint32),
    **dict.fromkeys(("b64", "u64", "s64"), np.uint64),
}
VALUES: dict[str, type[np.generic]] = BITS | {"s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32, "f16": np.float16}

_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})")
_ADDRESS = re.compile(r"\[\s*([%$\w@.]+)\s*(?:\+\s*(-?\d+))?\s*\]")


class Registers:
    """Values `[threads]` by name, and what threads may read besides."""

    def __init__(self, code: Code, program: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.code, self.num_threads = code, code.num_threads
        self._values: dict[str, np.ndarray] = {}
        self._fixed = {"%tid.x": np.arange(self.num_threads, dtype=np.uint32), "%laneid": np.arange(self.num_threads, dtype=np.uint32) % 32}
        for axis, i_p, num in zip("xyz", program, grid, strict=True):
            self._fixed[f"%ctaid.{axis}"] = np.full(self.num_threads, i_p, np.uint32)
            self._fixed[f"%nctaid.{axis}"] = np.full(self.num_threads, num, np.uint32)
        # Shared memory has addresses of its own, from 0.
        self._fixed["global_smem"] = np.zeros(self.num_threads, np.uint32)
        self._groups: list[tuple[set[str], set[str]]] = []  # operands and accumulators of each group of products in flight, the last not committed
        self._unordered: set[str] = set()  # written since wgmma.fence

    def add_symbol(self, name: str, address: int) -> None:
        self._fixed[name] = np.full(self.num_threads, address, np.uint64)

    def read(self, operand: str, kind: str) -> np.ndarray:
        """The bits of an operand of that type."""
        bits = BITS[kind]
        if operand in self._values:
            if any(operand in accumulators for _, accumulators in self._groups):
                raise Fault(f"{operand} is read while a product in flight writes it; wgmma.wait_group is missing")
            value = self._values[operand]
        elif operand in self._fixed:
            value = self._fixed[operand]
        elif found := _FLOAT.fullmatch(operand):
            value = np.full(self.num_threads, int(found[1], 16), np.uint32)
        elif _NUMBER.fullmatch(operand):
            number = int(operand.rstrip("U"), 0)
            value = np.full(self.num_threads, bool(number) if kind == "pred" else number % (1 << 8 * np.dtype(bits).itemsize), bits)
        else:
            raise Fault(f"{operand} is read before anything was written to it, or is an operand that is not known")
        if (value.dtype == np.bool_) != (kind == "pred"):
            raise Fault(f"{operand} of type {value.dtype} is read as {kind}")
        return value.astype(bits, copy=False)

    def values(self, operand: str, kind: str) -> np.ndarray:
        """An operand as numbers to compute with."""
        return self.read(operand, kind).view(VALUES[kind])

    def write(self, register: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        """The bits, cut or filled up to the register's width, of the threads in the mask."""
        if register == "_":
            return
        if any(register in operands or register in accumulators for operands, accumulators in self._groups):
            raise Fault(f"{register} is written while a product in flight uses it; wgmma.wait_group is missing")
        bits = BITS[self.code.type_of(register)]
        value = value.astype(bits) if value.dtype.itemsize != np.dtype(bits).itemsize else value.view(bits)
        if mask is not None and not mask.all():
            value = np.where(mask, value, self._values.get(register, np.zeros(self.num_threads, bits)))
        self._values[register] = value.copy()
        self._unordered.add(register)

    def vector(self, operand: str, kind: str) -> list[np.ndarray]:
        return [self.read(name, kind) for name in members(operand)]

    def address(self, operand: str) -> np.ndarray:
        """Where `[register + offset]` points, int64."""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise Fault(f"{operand} is no address that is known")
        base, offset = found[1], int(found[2] or 0)
        if base == "global_smem" or self.code.type_of(base) == "b32":
            return self.read(base, "b32").astype(np.int64) + offset
        return self.read(base, "b64").view(np.int64) + offset

    def order(self) -> None:
        """What was written so far may be a product's (wgmma.fence)."""
        self._unordered.clear()

    def use(self, operands: Iterable[str], accumulators: Iterable[str]) -> list[np.ndarray]:
        """A product starts; the bits of its accumulators."""
        operands, accumulators = set(operands), list(accumulators)
        late = sorted(self._unordered & (operands | set(accumulators)))
        if late:
            raise Fault(f"{late[0]} was written and then used by a product, with no wgmma.fence between")
        if not self._groups:
            self._groups.append((set(), set()))
        self._groups[-1][0].update(operands)
        self._groups[-1][1].update(accumulators)
        return [self._values.get(name, np.zeros(self.num_threads, np.uint32)) for name in accumulators]

    def accumulate(self, register: str, value: np.ndarray) -> None:
        """What a product will have written."""
        self._values[register] = value.view(np.uint32)

    def commit(self) -> None:
        self._groups.append((set(), set()))

    def wait(self, num_left: int) -> bool:
        """All groups but the last few have ended; whether all products have."""
        committed, open_group = self._groups[:-1], self._groups[-1:]
        self._groups = committed[max(len(committed) - num_left, 0) :] + open_group
        if not any(accumulators for _, accumulators in self._groups):
            self._groups.clear()
        return not self._groups
