"""Instructions of copies to shared memory, by TMA or by each lane, and of the barriers (mbarrier) that they arrive at."""

import re

import numpy as np

from tests.kit.ptx.faults import Fault
from tests.kit.ptx.matrix import swizzled
from tests.kit.ptx.parse import Instruction, members
from tests.kit.ptx.program import Program, by_warp, threads_in, unknown

# The engine's own, of a swizzled box and of plain bytes.
_BOX_ALIGN_BYTES = 128
_BULK_ALIGN_BYTES = 16


def copy(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    # Programs come alone, each a cluster by itself.
    match instruction.text.replace("shared::cluster", "shared"):
        case "cp.async.bulk.tensor.4d.shared.global.mbarrier::complete_tx::bytes":
            _copy_box(program, instruction, mask)
        case "cp.async.bulk.prefetch.L2.global":
            _prefetch(program, instruction, mask)
        case "cp.async.ca.shared.global" | "cp.async.cg.shared.global":
            _copy_by_lanes(program, instruction, mask)
        case "cp.async.mbarrier.arrive.noinc.shared.b64":
            addresses = program.registers.address(instruction.operands[0])
            for warp, own in by_warp(program, threads_in(program, mask)):
                if len(own) != program.code.num_threads // program.num_warps or (addresses[own] != addresses[own[0]]).any():
                    raise Fault("only some lanes of a warp arrive with what they copied, or they do at different barriers")
                program.barriers.arrive_with_copies(int(addresses[own[0]]), len(own), warp, instruction.line)
        case _:
            raise unknown(instruction)


def _copy_box(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """A box of rows by TMA, swizzled by where it comes to lie."""
    registers, (destination, source, where) = program.registers, instruction.operands
    tensor_map, _, corner = source.strip("[] ").partition(",")
    coordinates = [registers.values(name, "s32") for name in members(corner.strip())]
    for thread in threads_in(program, mask):
        boxes = program.maps.get(int(registers.read(tensor_map.strip(), "b64")[thread]))
        start = int(registers.address(destination)[thread])
        if boxes is None or start % _BOX_ALIGN_BYTES:
            raise Fault(f"a copy to {start}, which is no multiple of {_BOX_ALIGN_BYTES}" if boxes else "a copy by what is no tensor map")
        # The innermost dimension comes first.
        box = boxes.box([int(at[thread]) for at in reversed(coordinates)])
        places = swizzled(start + np.arange(box.size), boxes.row_bytes)
        program.barriers.copy(int(registers.address(where)[thread]), places, box.reshape(-1).copy(), int(program.warp[thread]), instruction.line)


def _prefetch(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Bytes are brought nearer, no more."""
    where, num_bytes = program.registers.address(instruction.operands[0]), program.registers.read(instruction.operands[1], "u32")
    for thread in threads_in(program, mask):
        program.memory.check(int(where[thread]), int(num_bytes[thread]), _BULK_ALIGN_BYTES)


def _copy_by_lanes(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    destination, source, *sizes = instruction.operands
    # A second size would fill up with zeros what it is smaller by.
    if not re.fullmatch(r"(0x4|0x8|0x10|4|8|16)", sizes[0]) or any(size != sizes[0] for size in sizes):
        raise unknown(instruction)
    to, where = program.registers.address(destination), program.registers.address(source)
    for warp, own in by_warp(program, threads_in(program, mask)):
        data = program.memory.load(where[own].view(np.uint64), int(sizes[0], 0))
        program.barriers.copy_by_lanes(to[own], data, warp, instruction.line)


def barrier(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, operands, threads = program.registers, instruction.operands, threads_in(program, mask)
    match instruction.text:
        case "mbarrier.init.shared.b64":
            for thread in threads:
                program.barriers.init(int(registers.address(operands[0])[thread]), int(operands[1]), int(program.warp[thread]), instruction.line)
        case "mbarrier.inval.shared.b64":
            for thread in threads:
                program.barriers.invalidate(int(registers.address(operands[0])[thread]), int(program.warp[thread]), instruction.line)
        case "mbarrier.arrive.expect_tx.shared.b64":
            for thread in threads:
                address, num_bytes = int(registers.address(operands[1])[thread]), int(registers.read(operands[2], "u32")[thread])
                program.barriers.expect(address, num_bytes, int(program.warp[thread]), instruction.line)
        case "mbarrier.try_wait.parity.shared.b64":
            addresses, parities = registers.address(operands[1]), registers.read(operands[2], "u32")
            if mask is not None or (addresses != addresses[0]).any() or (parities != parities[0]).any():
                raise Fault("threads wait for different phases, or only some wait")
            program.barriers.wait(int(addresses[0]), int(parities[0]), instruction.line)
            registers.write(operands[0], np.ones(program.code.num_threads, bool), mask)
        case _:
            raise unknown(instruction)
