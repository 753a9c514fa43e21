"""What each instruction does: moves, loads and stores, what lanes and threads do together here; numbers, matrices and copies in files of their own."""

import re

import numpy as np

from tests.kit.ptx.arithmetic import ARITHMETIC, choose, compare, compute, convert, extract, permute, shift
from tests.kit.ptx.copies import barrier, copy
from tests.kit.ptx.matrix import ldmatrix, mma, stmatrix, wgmma
from tests.kit.ptx.parse import Instruction, members
from tests.kit.ptx.program import LANES, Execute, Program, by_warp, threads_in, unknown
from tests.kit.ptx.registers import BITS

_ACCESS = re.compile(r"(?:ld|st)\.(global|shared)(?:\.cg)?(?:\.v([24]))?\.(b16|b32|b64)")


def _move(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, (output, source) = program.registers, instruction.operands
    if source.startswith("{"):
        low, high = members(source)
        narrow = program.code.type_of(low)
        whole = registers.read(low, narrow).astype(np.uint64) | registers.read(high, narrow).astype(np.uint64) << np.uint64(int(narrow[1:]))
        registers.write(output, whole, mask)
    elif output.startswith("{"):
        low, high = members(output)
        whole = registers.read(source, instruction.type)
        shift_by = int(program.code.type_of(low)[1:])
        if 2 * shift_by != 8 * whole.itemsize:
            raise unknown(instruction)
        registers.write(low, whole.astype(f"u{shift_by // 8}"), mask)
        registers.write(high, (whole >> whole.dtype.type(shift_by)).astype(f"u{shift_by // 8}"), mask)
    else:
        registers.write(output, registers.read(source, instruction.type), mask)


def _parameter_address(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    if instruction.text not in ("cvta.param.u64", "cvta.global.u64", "cvta.to.global.u64"):
        raise unknown(instruction)
    program.registers.write(instruction.operands[0], program.registers.read(instruction.operands[1], "b64"), mask)


def _access(instruction: Instruction) -> tuple[str, int, str]:
    """Space, registers of a thread and their type."""
    found = _ACCESS.fullmatch(instruction.text)
    if found is None:
        raise unknown(instruction)
    return found[1], int(found[2] or 1), found[3]


def _load(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, (output, where) = program.registers, instruction.operands
    if instruction.modifiers[0] == "param":
        value = program.parameters[where.strip("[] ")]
        registers.write(output, np.full(program.code.num_threads, value, BITS[instruction.type]), mask)
        return
    space, num, kind = _access(instruction)
    size = np.dtype(BITS[kind]).itemsize
    addresses, threads = registers.address(where), threads_in(program, mask)
    data = np.zeros((program.code.num_threads, num * size), np.uint8)
    if space == "shared":
        for _, own in by_warp(program, threads):
            program.shared.on_read(int(program.warp[own[0]]), program.shared.cells(addresses[own], num * size), instruction.line)
        data[threads] = program.shared.bytes[addresses[threads][:, None] + np.arange(num * size)]
    else:
        data[threads] = program.memory.load(addresses[threads].view(np.uint64), num * size)
    for i, register in enumerate(members(output)):
        registers.write(register, np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(BITS[kind])[:, 0], mask)


def _store(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, (where, source) = program.registers, instruction.operands
    space, num, kind = _access(instruction)
    addresses, threads = registers.address(where), threads_in(program, mask)
    data = np.stack(registers.vector(source, kind), 1).view(np.uint8)
    num_bytes = num * np.dtype(BITS[kind]).itemsize
    if space == "global":
        program.memory.store(addresses[threads].view(np.uint64), data[threads])
        return
    for warp, own in by_warp(program, threads):
        cells = program.shared.cells(addresses[own], num_bytes)
        places = addresses[own][:, None] + np.arange(num_bytes)
        program.shared.on_write(warp, cells, instruction.line, same=bool((program.shared.bytes[places] == data[own]).all()))
        program.shared.bytes[places] = data[own]


def _count(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Atomic: one thread after another."""
    if instruction.text != "atom.global.gpu.acq_rel.add.u32":
        raise unknown(instruction)
    output, where, operand = instruction.operands
    addresses, by = program.registers.address(where).view(np.uint64), program.registers.read(operand, "u32")
    found = np.zeros(program.code.num_threads, np.uint32)
    for thread in threads_in(program, mask):
        one = slice(thread, thread + 1)
        found[one] = program.memory.load(addresses[one], 4).view(np.uint32)[0]
        program.memory.store(addresses[one], (found[one] + by[one]).view(np.uint8)[None])
    program.registers.write(output, found, mask)


def _shuffle(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Lanes read each other's registers; one that would read beyond its warp reads its own."""
    output, source, by, clamp, members_mask = instruction.operands
    if "|" in output or members_mask not in ("-1", "0xffffffff") or clamp != ("0" if ".up." in instruction.text else "31"):
        raise unknown(instruction)
    registers, lane = program.registers, np.arange(LANES)
    amount = registers.read(by, "u32").astype(np.int64).reshape(-1, LANES)
    sources = {"bfly": lane ^ amount, "up": lane - amount, "down": lane + amount, "idx": amount % LANES}
    if instruction.modifiers[1] not in sources:
        raise unknown(instruction)
    at = sources[instruction.modifiers[1]]
    at = np.where((at >= 0) & (at < LANES), at, lane)
    registers.write(output, np.take_along_axis(registers.read(source, "b32").reshape(-1, LANES), at, 1).reshape(-1), mask)


def _reduce(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    how = {"redux.sync.add.s32": np.add, "redux.sync.add.u32": np.add, "redux.sync.or.b32": np.bitwise_or, "redux.sync.and.b32": np.bitwise_and}
    output, source, of = instruction.operands
    if instruction.text not in how or (program.registers.read(of, "b32") != 0xFFFFFFFF).any():
        raise unknown(instruction)
    values = program.registers.read(source, "b32").reshape(-1, LANES)
    program.registers.write(output, np.repeat(how[instruction.text].reduce(values, axis=1, dtype=np.uint32), LANES), mask)


def _elect(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Which lane is open; the first here."""
    lane, elected = instruction.operands[0].split("|")
    first = np.arange(program.code.num_threads) % LANES == 0
    program.registers.write(lane, np.zeros(len(first), np.uint32), mask)
    program.registers.write(elected, first, mask)


def _meet(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    # Threads of a warp go in step here.
    if instruction.text == "bar.warp.sync":
        return
    if instruction.text != "bar.sync" or instruction.operands != ("0",):
        raise unknown(instruction)
    program.shared.meet()


def _fence(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    if instruction.text not in ("fence.proxy.async.shared", "fence.proxy.async"):
        raise unknown(instruction)
    for warp, _ in by_warp(program, threads_in(program, mask)):
        program.shared.fence(warp)


def _depend(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Other kernels are over, or not begun."""
    if instruction.text not in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        raise unknown(instruction)


INSTRUCTIONS: dict[str, Execute] = {
    **dict.fromkeys(ARITHMETIC, compute),
    **dict.fromkeys(("shl", "shr"), shift),
    "bfe": extract,
    "setp": compare,
    "selp": choose,
    "prmt": permute,
    "cvt": convert,
    "mov": _move,
    "cvta": _parameter_address,
    "ld": _load,
    "st": _store,
    "atom": _count,
    "shfl": _shuffle,
    "redux": _reduce,
    "elect": _elect,
    "bar": _meet,
    "fence": _fence,
    "griddepcontrol": _depend,
    "mbarrier": barrier,
    "cp": copy,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "mma": mma,
    "wgmma": wgmma,
}
