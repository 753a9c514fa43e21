"""A recorded launch of a compiled kernel, carried out on the host tensors that it was recorded with."""

from collections.abc import Mapping

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atoll.probe.gluon_memory import Descriptor
from tests.kit.build import Cost, Launch, passed
from tests.kit.ptx.faults import Fault
from tests.kit.ptx.instructions import INSTRUCTIONS
from tests.kit.ptx.memory import GlobalMemory
from tests.kit.ptx.parse import Code, Parameter, parse
from tests.kit.ptx.program import Boxes, Program

# Addresses of tensor maps, apart from all of memory.
_MAPS = 1 << 60


def launch_compiled(launch: Launch, cost: Cost, ptx: str | None = None) -> int:
    """Run all programs, one after another; the number of instructions. Raises a Fault at the first thing that is wrong.

    `ptx`: the kernel's text with something done to it.
    """
    code = parse(cost.ptx if ptx is None else ptx)
    memory, maps, parameters = GlobalMemory(), dict[int, Boxes](), dict[str, int]()
    left = iter(code.parameters)
    for _, value in passed(launch):
        if isinstance(value, TensorDescriptor):
            address = _MAPS + 64 * len(maps)
            maps[address] = _boxes(value)
            # The map, and then its shape and strides again.
            for part in (address, *value.shape, *value.strides):
                parameters[next(left).name] = part
        else:
            parameter = next(left)
            parameters[parameter.name] = _word(value, parameter, memory)
    # Triton's own scratch memory, of which these kernels have none.
    parameters |= {parameter.name: 0 for parameter in left}
    return run_programs(code, parameters, maps, memory, cost.shared_bytes, launch.grid)


def run_programs(
    code: Code, parameters: Mapping[str, int], maps: Mapping[int, Boxes], memory: GlobalMemory, num_shared_bytes: int, grid: tuple[int, ...]
) -> int:
    """All programs of a grid, one after another; the number of instructions."""
    nx, ny, nz = (*grid, 1, 1)[:3]
    num_steps = 0
    with np.errstate(all="ignore"):
        for z, y, x in np.ndindex(nz, ny, nx):
            program = Program(code, parameters, maps, memory, num_shared_bytes, (x, y, z), (nx, ny, nz))
            try:
                program.run(INSTRUCTIONS)
            except Fault as fault:
                fault.args = (f"program {(x, y, z)}: {fault}",)
                raise
            num_steps += program.num_steps
    return num_steps


def _word(value: torch.Tensor | float, parameter: Parameter, memory: GlobalMemory) -> int:
    """The bits of a number or pointer, as the kernel takes it."""
    if isinstance(value, torch.Tensor):
        return memory.add(value)
    if parameter.type == "f32":
        return int(np.float32(value).view(np.uint32))
    return int(value) % (1 << int(parameter.type[1:]))


def _boxes(host: TensorDescriptor) -> Boxes:
    # One copy takes a row up to the swizzle's bytes; what a block is wider, the compiler makes more copies of.
    row_bytes = min(host.layout.swizzle_byte_width, host.block_shape[-1] * host.base.element_size())
    return Boxes(Descriptor(host).bits, host.block_shape[-2], row_bytes)
