"""Instructions of matrices: fragments to and from shared memory (ldmatrix, stmatrix), products in registers (mma) and of a warpgroup (wgmma)."""

import re

import numpy as np

from tests.kit.ptx.faults import Fault
from tests.kit.ptx.parse import Instruction, members
from tests.kit.ptx.program import LANES, Program, unknown

_LANE = np.arange(LANES)
_ROW, _PAIR = _LANE // 4, _LANE % 4

# By the swizzle's number in a descriptor: bytes of a row. The 16-byte pieces of a row change places by the bits of the row's number.
_SWIZZLES = {1: 128, 2: 64, 3: 32}

# Rows and columns where an accumulator's four numbers lie, beyond the thread's own.
_ACCUMULATORS = ((0, 0), (0, 1), (8, 0), (8, 1))


def swizzled(addresses: np.ndarray, row_bytes: int) -> np.ndarray:
    """Where bytes of shared memory lie whose rows are of 32, 64 or 128 bytes."""
    return addresses ^ (((addresses >> 7) & (row_bytes // 16 - 1)) << 4)


def ldmatrix(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    num, transposed = _matrices(instruction)
    registers, shared = program.registers, program.shared
    rows = registers.address(instruction.operands[1]).reshape(-1, LANES)[:, : 8 * num]
    fragments = np.empty((num, program.num_warps, LANES), np.uint32)
    for warp in range(program.num_warps):
        shared.on_read(warp, shared.cells(rows[warp], 16), instruction.line)
        matrices = shared.bytes[rows[warp][:, None] + np.arange(16)].view(np.uint16).reshape(num, 8, 8)
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1) if transposed else matrices)
        fragments[:, warp] = matrices.view(np.uint32)[:, _ROW, _PAIR]
    for register, fragment in zip(members(instruction.operands[0]), fragments, strict=True):
        registers.write(register, fragment.reshape(-1), mask)


def stmatrix(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    num, transposed = _matrices(instruction)
    registers, shared = program.registers, program.shared
    rows = registers.address(instruction.operands[0]).reshape(-1, LANES)[:, : 8 * num]
    fragments = np.stack(registers.vector(instruction.operands[1], "b32")).reshape(num, program.num_warps, LANES)
    for warp in range(program.num_warps):
        matrices = np.empty((num, 8, 4), np.uint32)
        matrices[:, _ROW, _PAIR] = fragments[:, warp]
        pairs = matrices.view(np.uint16)
        pairs = np.ascontiguousarray(pairs.transpose(0, 2, 1) if transposed else pairs)
        places, data = rows[warp][:, None] + np.arange(16), pairs.view(np.uint8).reshape(8 * num, 16)
        cells = shared.cells(rows[warp], 16)
        shared.on_write(warp, cells, instruction.line, same=bool((shared.bytes[places] == data).all()))
        shared.bytes[places] = data


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    """How many, and whether transposed."""
    found = re.fullmatch(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", instruction.text)
    if found is None:
        raise unknown(instruction)
    return int(found[1]), found[2] is not None


def mma(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32", instruction.text)
    if found is None:
        raise unknown(instruction)
    registers = program.registers
    a, b = (registers.vector(operand, "b32") for operand in instruction.operands[1:3])
    c = registers.vector(instruction.operands[3], "f32")
    columns = np.empty((program.num_warps, 16, 8), np.float32)
    for i, pairs in enumerate(b):
        columns[:, 2 * _PAIR + 8 * i, _ROW], columns[:, 2 * _PAIR + 8 * i + 1, _ROW] = unpacked(pairs.reshape(-1, LANES), found[1])
    product = _rows(a, found[1]) @ columns
    for register, old, (row, column) in zip(members(instruction.operands[0]), c, _ACCUMULATORS, strict=True):
        new = old.view(np.float32) + product[:, _ROW + row, 2 * _PAIR + column].reshape(-1)
        registers.write(register, new, mask)


def _rows(fragments: list[np.ndarray], kind: str) -> np.ndarray:
    """The operand of 16 rows and columns that each warp's registers hold, `[warps, 16, 16]` float32."""
    rows = np.empty((len(fragments[0]) // LANES, 16, 16), np.float32)
    for pairs, (row, column) in zip(fragments, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
        low, high = unpacked(pairs.reshape(-1, LANES), kind)
        rows[:, _ROW + row, 2 * _PAIR + column], rows[:, _ROW + row, 2 * _PAIR + column + 1] = low, high
    return rows


def unpacked(pairs: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The two 16-bit numbers of a register, as float32."""
    low, high = (pairs & 0xFFFF).astype(np.uint16), (pairs >> 16).astype(np.uint16)
    return widened(low, kind), widened(high, kind)


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """float16 or bfloat16 as float32."""
    return bits.view(np.float16).astype(np.float32) if kind == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)


def wgmma(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, shared = program.registers, program.shared
    match instruction.text:
        case "wgmma.fence.sync.aligned":
            registers.order()
        case "wgmma.commit_group.sync.aligned":
            registers.commit()
        case "wgmma.wait_group.sync.aligned":
            if registers.wait(int(instruction.operands[0])):
                for warp in range(program.num_warps):
                    agent = shared.product(warp)
                    shared.seen[warp, agent] = shared.time[agent]
                    shared.time[agent] += 1
        case _:
            _multiply(program, instruction)


def _multiply(program: Program, instruction: Instruction) -> None:
    """64 rows in a warpgroup's registers by columns in shared memory."""
    found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2", instruction.text)
    outputs, rows, descriptor, scale, *signs, transposed = instruction.operands
    if found is None or not rows.startswith("{") or signs != ["1", "1"]:
        raise unknown(instruction)
    registers, shared = program.registers, program.shared
    a = _rows(registers.vector(rows, "b32"), found[2])
    keep = registers.read(scale, "pred")
    names = members(outputs)
    accumulators = [np.where(keep, old.view(np.float32), 0) for old in registers.use(members(rows), names)]
    for warp, where in enumerate(registers.read(descriptor, "b64").reshape(-1, LANES)[:, 0]):
        places = _operand(int(where), int(found[1]), transposed == "1")
        shared.on_read(warp, shared.cells(places.reshape(-1), 2), instruction.line, shared.product(warp))
        bits = shared.bytes[places[..., None] + np.arange(2)].view(np.uint16)[..., 0]
        product = a[warp] @ widened(bits, found[2])
        for i, accumulator in enumerate(accumulators):
            row, column = _ACCUMULATORS[i % 4]
            accumulator[LANES * warp : LANES * (warp + 1)] += product[_ROW + row, 8 * (i // 4) + 2 * _PAIR + column]
    for name, accumulator in zip(names, accumulators, strict=True):
        registers.accumulate(name, accumulator.astype(np.float32))


def _operand(descriptor: int, num_columns: int, transposed: bool) -> np.ndarray:
    """Addresses of the 16 rows of an operand in shared memory, `[16, columns]`; a matrix descriptor has them in units of 16 bytes."""
    start, leading, stride = (((descriptor >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    swizzle, offset = descriptor >> 62, (descriptor >> 49) & 7
    if swizzle not in _SWIZZLES or offset:
        raise Fault(f"a matrix descriptor of swizzle {swizzle} and offset {offset}; known are swizzles {sorted(_SWIZZLES)} at offset 0")
    row_bytes = _SWIZZLES[swizzle]
    k, n = np.arange(16)[:, None], np.arange(num_columns)[None]
    if transposed:
        # Rows of columns: 8 rows are a piece, and what goes beyond a row's bytes lies in the next panel.
        per_row = row_bytes // 2
        places = start + k // 8 * stride + k % 8 * row_bytes + n // per_row * leading + n % per_row * 2
    else:
        places = start + n // 8 * stride + n % 8 * row_bytes + k * 2
    return swizzled(places, row_bytes)
