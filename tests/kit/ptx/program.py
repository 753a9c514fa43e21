"""One program (CTA) of a compiled kernel: its threads go through the instructions in step, and part only for branches that skip forward."""

from collections.abc import Callable, Mapping

import numpy as np

from tests.kit.ptx.barriers import Barriers
from tests.kit.ptx.faults import Fault
from tests.kit.ptx.memory import GlobalMemory, SharedMemory
from tests.kit.ptx.parse import Code, Instruction
from tests.kit.ptx.registers import Registers

LANES = 32

# A loop that runs so long does not end.
_MAX_STEPS = 1_000_000

# All threads of a warp, or of the program, must come to these.
TOGETHER = frozenset({"bar", "ldmatrix", "stmatrix", "mma", "wgmma", "shfl", "redux", "elect"})


class Program:
    """The state that instructions change."""

    def __init__(
        self,
        code: Code,
        parameters: Mapping[str, int],
        maps: Mapping[int, "Boxes"],
        memory: GlobalMemory,
        num_shared_bytes: int,
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.code, self.parameters, self.maps, self.memory = code, parameters, maps, memory
        self.num_warps = code.num_threads // LANES
        self.warp = np.arange(code.num_threads) // LANES
        self.registers = Registers(code, program, grid)
        self.shared = SharedMemory(num_shared_bytes, self.num_warps)
        self.barriers = Barriers(self.shared)
        self.num_steps = 0
        for parameter in code.parameters:
            if parameter.type == "b8":
                self.registers.add_symbol(parameter.name, parameters[parameter.name])

    def run(self, table: Mapping[str, "Execute"]) -> None:
        """All instructions, by what each name does."""
        self._table = table
        self._run(0, len(self.code.instructions), None)
        self.barriers.close()

    def _run(self, i: int, stop: int, active: np.ndarray | None) -> None:
        """From one instruction to another, by the threads that are active."""
        while i < stop:
            instruction = self.code.instructions[i]
            self.num_steps += 1
            try:
                if self.num_steps > _MAX_STEPS:
                    raise Fault(f"no end after {_MAX_STEPS} instructions")
                if instruction.name == "ret":
                    if active is not None or instruction.guard is not None:
                        raise Fault("only some threads may end here, which is not known")
                    return
                mask = self._mask(instruction, active)
                if instruction.name != "bra":
                    self._execute(instruction, mask, active)
                    i += 1
                    continue
                target = self.code.labels[instruction.operands[0]]
                here = np.ones(self.code.num_threads, bool) if active is None else active
                taken = here if mask is None else mask
                together = bool((taken == here).all())
                if taken.any() and (target > stop or (target <= i and active is not None) or (target <= i and not together)):
                    raise Fault("threads part at a branch that does not skip forward, and would meet again at no place that is known here")
            except Fault as fault:
                fault.args = (f"{fault} ({instruction.text} in line {instruction.line} of the PTX, made of {instruction.source})",)
                raise
            if taken.any() and not together:
                self._run(i + 1, target, here & ~taken)
            i = target if taken.any() else i + 1

    def _mask(self, instruction: Instruction, active: np.ndarray | None) -> np.ndarray | None:
        """The threads that an instruction is for; None for all."""
        if instruction.guard is None:
            return active
        guard = self.registers.read(instruction.guard, "pred")
        guard = ~guard if instruction.negated else guard
        return guard if active is None else guard & active

    def _execute(self, instruction: Instruction, mask: np.ndarray | None, active: np.ndarray | None) -> None:
        if instruction.name not in self._table:
            raise unknown(instruction)
        if instruction.name in TOGETHER and (active is not None or (mask is not None and not mask.all())):
            raise Fault("only some threads come to what is for all of them")
        self._table[instruction.name](self, instruction, mask)


class Boxes:
    """What a tensor map says of copies: a box of rows, of the last dimension as much as the swizzle takes."""

    def __init__(self, bits: np.ndarray, num_rows: int, row_bytes: int) -> None:
        self._bits, self.num_rows, self.row_bytes = bits, num_rows, row_bytes

    def box(self, corner: list[int]) -> np.ndarray:
        """Bytes `[rows, row_bytes]`, zeros beyond the tensor; the corner is that of the outermost dimension first."""
        if any(not 0 <= at < size for at, size in zip(corner, self._bits.shape, strict=True)):
            raise Fault(f"a copy of a box at {corner}, out of bounds of a tensor of shape {list(self._bits.shape)}")
        width = self.row_bytes // self._bits.itemsize
        result = np.zeros((self.num_rows, width), self._bits.dtype)
        page, head, row, column = corner
        found = self._bits[page, head, row : row + self.num_rows, column : column + width]
        result[: found.shape[0], : found.shape[1]] = found
        return result.view(np.uint8)


Execute = Callable[[Program, Instruction, np.ndarray | None], None]


def unknown(instruction: Instruction) -> Fault:
    return Fault(f"{instruction.text} {', '.join(instruction.operands)} is not known here; say what it does in tests/kit/ptx, with a test")


def threads_in(program: Program, mask: np.ndarray | None) -> np.ndarray:
    """Numbers of the threads that an instruction is for."""
    return np.arange(program.code.num_threads) if mask is None else np.flatnonzero(mask)


def by_warp(program: Program, threads: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each warp that has threads among these, and which."""
    return [(warp, own) for warp in range(program.num_warps) if len(own := threads[program.warp[threads] == warp])]
