"""Shared memory of an interpreted Gluon program, its barriers, its copies and its products by wgmma, each as late and as hostile as hardware may be.

Fresh memory holds NaN. A copy, by TMA or lane by lane (cp.async), makes its destination NaN when it is issued; its bytes arrive when the barrier's phase is
waited for. A product may read its operands as late as `warpgroup_mma_wait`. What on a GPU would hang or race is a HazardError: a wait for a phase that cannot
come, a byte count that is not what was issued, a read of memory that a copy is still to write, a store or a copy into memory that a product in flight reads, a
copy into memory that was read since all threads last met (`program_barrier`), and copies or products in flight when the program ends. So is a product of, or a
copy by TMA over, what threads have stored without `fence_async_shared` after it and `program_barrier` after that: both go by the asynchronous proxy.

Not modelled: the proxy fence between `mbarrier.init` and a copy, and races among the threads of a program over what they store themselves (the compiler places
those barriers) or over what products that were waited for have read (it does not always, between warpgroups: Triton's issue 11047).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl

from atoll.probe.gluon_values import NotInterpretedError, Value, bits_of, from_bits, hostile_bits
from atoll.probe.watch import watch

DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


class HazardError(RuntimeError):
    """What on a GPU would hang, or read or overwrite memory too soon."""


class Descriptor:
    """What a kernel sees of a host's TensorDescriptor."""

    def __init__(self, host: Any) -> None:
        bits = host.base.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[host.base.element_size()])
        strided = bits.as_strided(host.shape, host.strides).numpy()
        self.bits = strided.view(f"u{strided.itemsize}")
        self.dtype = DTYPES[host.base.dtype]
        self.block_type = tl.block_type(self.dtype, list(host.block_shape))
        self.layout = host.layout
        if host.padding != "zero":
            raise TypeError(f"a descriptor's padding {host.padding!r} is not interpreted: only zero is")

    @property
    def block_shape(self) -> list[int]:
        return list(self.block_type.shape)

    def box(self, corner: Sequence[int]) -> np.ndarray:
        """The bits of one box; zeros beyond the tensor. A box that lies outside altogether is what a page id that does not exist asks for: a stray."""
        result = np.zeros(self.block_shape, self.bits.dtype)
        bounds = [(max(at, 0), min(at + n, size)) for at, n, size in zip(corner, self.block_shape, self.bits.shape, strict=True)]
        if any(low >= high for low, high in bounds):
            watch.strays.append(f"copy of a box at {list(corner)} of a tensor of shape {list(self.bits.shape)}")
            return result
        here = tuple(slice(low - at, high - at) for (low, high), at in zip(bounds, corner, strict=True))
        result[here] = self.bits[tuple(slice(low, high) for low, high in bounds)]
        return result


@dataclass
class Barrier:
    """An mbarrier: its phase ends when all have arrived and all expected bytes are there."""

    count: int
    left: int  # arrivals of this phase still to come
    phase: int = 0  # parity of the phase that runs
    expected: int = 0  # bytes
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # destination, bits: by TMA, whose bytes are expected
    lane_copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def issued(self) -> int:
        return sum(bits.nbytes for _, bits in self.copies)

    def arrive(self, count: int = 1) -> None:
        if count > self.left:
            raise HazardError(f"{count} arrivals at a barrier that waits for {self.left} more; its phase was never waited for")
        self.left -= count
        if not self.left and not self.expected and not self.copies and not self.lane_copies:
            self._next_phase()

    def expect(self, num_bytes: int) -> None:
        """One arrival, and so many bytes more until the phase ends."""
        self.expected += num_bytes
        self.arrive()

    def wait(self, phase: int) -> None:
        if phase not in (0, 1):
            raise HazardError(f"a wait for phase {phase}, which is neither 0 nor 1, would hang")
        if phase != self.phase:
            return
        if self.left:
            raise HazardError(f"a wait for a phase with {self.left} arrivals missing would hang")
        if self.issued != self.expected:
            raise HazardError(f"a wait for {self.expected} bytes, where {self.issued} were issued, would hang")
        for destination, bits in self.copies + self.lane_copies:
            destination[...] = bits
        self._next_phase()

    def _next_phase(self) -> None:
        self.phase ^= 1
        self.left = self.count
        self.expected = 0
        self.copies = []
        self.lane_copies = []


class SharedSpace:
    """The shared memory of one program."""

    def __init__(self) -> None:
        self.barriers: dict[int, Barrier] = {}  # by address
        self.lane_copies: list[tuple[np.ndarray, np.ndarray]] = []  # that no barrier counts yet
        self.reads: list[np.ndarray] = []  # since all threads last met
        self.products: list[np.ndarray] = []  # what products in flight read
        self.unfenced: list[np.ndarray] = []  # stored since the last fence
        self.fenced: list[np.ndarray] = []  # and before it, but since all threads last met

    def allocate(self, dtype: tl.dtype, shape: Sequence[int], layout: Any, value: Value | None = None) -> "SharedMemory":
        memory = SharedMemory(self, hostile_bits(shape, dtype), dtype, layout)
        if value is not None:
            memory.store(value)
        return memory

    def init(self, memory: "SharedMemory", count: int) -> None:
        self.barriers[memory.address] = Barrier(count, count)

    def barrier(self, memory: "SharedMemory") -> Barrier:
        if memory.address not in self.barriers:
            raise HazardError("a barrier is used before mbarrier.init")
        return self.barriers[memory.address]

    def copy(self, descriptor: Descriptor, corner: Sequence[int], bar: "SharedMemory", memory: "SharedMemory") -> None:
        if memory.shape != descriptor.block_shape or memory.dtype != descriptor.dtype:
            raise TypeError(f"a box of {descriptor.dtype} {descriptor.block_shape} is copied to {memory.dtype} {memory.shape}")
        self._check_published(memory.bits, "a copy into")
        self._begin_copy(memory)
        self.barrier(bar).copies.append((memory.bits, descriptor.box(corner)))

    def copy_lanes(self, memory: "SharedMemory", bits: np.ndarray) -> None:
        """Of `bits` as they lie in global memory now, which a kernel does not write."""
        self._begin_copy(memory)
        self.lane_copies.append((memory.bits, bits))

    def arrive_after_lane_copies(self, bar: "SharedMemory", num_threads: int) -> None:
        """Each thread arrives once what it has copied so far is there."""
        barrier = self.barrier(bar)
        barrier.lane_copies += self.lane_copies
        self.lane_copies = []
        barrier.arrive(num_threads)

    def _begin_copy(self, memory: "SharedMemory") -> None:
        if any(_overlap(memory.bits, read) for read in self.reads):
            raise HazardError("a copy into shared memory that was read since the last program_barrier: other warps may still read it")
        self._check_writable(memory.bits, "a copy into")
        memory.bits[...] = hostile_bits((), memory.dtype)

    def check_settled(self, bits: np.ndarray, access: str) -> None:
        in_flight = [*self.lane_copies, *(copy for barrier in self.barriers.values() for copy in barrier.copies + barrier.lane_copies)]
        if any(_overlap(bits, destination) for destination, _ in in_flight):
            raise HazardError(f"{access} shared memory that a copy in flight is still to write; its barrier was not waited for")

    def store(self, memory: "SharedMemory", value: Value) -> None:
        if value.shape != memory.shape or value.dtype != memory.dtype:
            raise TypeError(f"{value.dtype} {value.shape} is stored to shared memory of {memory.dtype} {memory.shape}")
        self._check_writable(memory.bits, "a store to")
        memory.bits[...] = bits_of(value)
        self.unfenced.append(memory.bits)

    def multiply(self, memory: "SharedMemory") -> Value:
        """The operand of a product in flight."""
        self.check_settled(memory.bits, "a product of")
        self._check_published(memory.bits, "a product of")
        self.products.append(memory.bits)
        # Now, since no store or copy may change it until the product is waited for.
        return from_bits(memory.bits.copy(), memory.dtype, memory.layout)

    def end_products(self) -> None:
        """This thread has waited for them; others may not have."""
        self.reads += self.products
        self.products.clear()

    def fence(self) -> None:
        """What threads have stored is ordered before what the asynchronous proxy does next, for the threads that know of it."""
        self.fenced += self.unfenced
        self.unfenced.clear()

    def _check_writable(self, bits: np.ndarray, access: str) -> None:
        self.check_settled(bits, access)
        if any(_overlap(bits, operand) for operand in self.products):
            raise HazardError(f"{access} shared memory that a product in flight may still read; it was not waited for")

    def _check_published(self, bits: np.ndarray, access: str) -> None:
        for stored, missing in ((self.unfenced, "fence_async_shared"), (self.fenced, "program_barrier after the fence")):
            if any(_overlap(bits, place) for place in stored):
                raise HazardError(f"{access} shared memory that threads stored to, with no {missing} since")

    def meet(self) -> None:
        """All threads of the program are past what they read, and past their fences."""
        self.reads.clear()
        self.fenced.clear()

    def close(self) -> None:
        """The program has ended."""
        if self.products:
            raise HazardError("the program ends with a product in flight, which was never waited for")
        for barrier in self.barriers.values():
            if barrier.copies or barrier.expected:
                raise HazardError(f"the program ends with {barrier.issued} bytes in flight and {barrier.expected} expected")
        if self.lane_copies or any(barrier.lane_copies for barrier in self.barriers.values()):
            raise HazardError("the program ends with copies of its lanes in flight, which were never waited for")


class SharedMemory:
    """A view of shared memory, as bits."""

    def __init__(self, space: SharedSpace, bits: np.ndarray, dtype: tl.dtype, layout: Any) -> None:
        self.space, self.bits, self.dtype, self.layout = space, bits, dtype, layout

    @property
    def shape(self) -> list[int]:
        return list(self.bits.shape)

    @property
    def address(self) -> int:
        return int(self.bits.__array_interface__["data"][0])

    def index(self, i: Any) -> "SharedMemory":
        at = int(i.__index__())
        if not 0 <= at < self.bits.shape[0]:
            raise HazardError(f"index {at} of shared memory of shape {self.shape}")
        return self._view(self.bits[at])

    def slice(self, start: int, length: int, dim: int = 0) -> "SharedMemory":
        if start < 0 or start + length > self.bits.shape[dim]:
            raise HazardError(f"rows {start} to {start + length} of shared memory of shape {self.shape}")
        return self._view(self.bits[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Sequence[int]) -> "SharedMemory":
        return self._view(self.bits.transpose(order))

    def reshape(self, shape: Sequence[int]) -> "SharedMemory":
        view = self.bits.reshape(tuple(shape))
        if not np.may_share_memory(view, self.bits):
            raise TypeError(f"shared memory of shape {self.shape} has no view of shape {list(shape)}")
        return self._view(view)

    def load(self, layout: Any) -> Value:
        self.space.check_settled(self.bits, "a read of")
        self.space.reads.append(self.bits)
        return from_bits(self.bits.copy(), self.dtype, layout)

    def store(self, value: Value) -> None:
        self.space.store(self, value)

    def _reinterpret(self, dtype: tl.dtype, shape: Sequence[int], layout: Any) -> "SharedMemory":
        """The first bytes, as something else."""
        if not self.bits.flags.c_contiguous:
            raise TypeError(f"shared memory of shape {self.shape} that does not lie in one piece is not reinterpreted")
        elements = self.bits.reshape(-1).view(hostile_bits((), dtype).dtype)
        if math.prod(shape) > elements.size:
            raise HazardError(f"{self.bits.nbytes} bytes of shared memory are reinterpreted as {dtype} {list(shape)}")
        return SharedMemory(self.space, elements[: math.prod(shape)].reshape(tuple(shape)), dtype, layout)

    def _view(self, bits: np.ndarray) -> "SharedMemory":
        return SharedMemory(self.space, bits, self.dtype, self.layout)


def check_lanes(pointer: Value) -> None:
    """A lane copies its consecutive elements at once, from an address that is a multiple of their size."""
    layout = pointer.layout
    if not isinstance(layout, gl.BlockedLayout) or layout.order[0] != layout.rank - 1:
        raise NotInterpretedError(f"an async_copy of addresses of layout {layout} is not interpreted: what a lane copies is unknown")
    num, num_bytes = layout.size_per_thread[-1], pointer.dtype.element_ty.primitive_bitwidth // 8
    lanes = pointer.data.reshape(-1, num)
    if num * num_bytes not in (4, 8, 16):
        raise TypeError(f"a lane copies 4, 8 or 16 bytes at once, not {num * num_bytes}")
    if (lanes[:, 0] % (num * num_bytes)).any() or (np.diff(lanes, axis=1) != num_bytes).any():
        raise HazardError(f"a lane's copy of {num * num_bytes} bytes does not lie in one piece at a multiple of that")


def _overlap(x: np.ndarray, y: np.ndarray) -> bool:
    # Of the bytes between first and last: slots and rows of one allocation lie apart.
    return np.may_share_memory(x, y)
