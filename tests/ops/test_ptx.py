"""What runs compiled kernels does what PTX says, instruction by instruction, and finds races, hangs and strays in kernels of a few lines."""

import math
import re
import struct
from collections.abc import Callable

import pytest
import torch

from tests.kit.ptx.faults import Fault, Race
from tests.kit.ptx.launch import run_programs
from tests.kit.ptx.memory import GlobalMemory
from tests.kit.ptx.parse import parse

THREADS = 64
WORDS = [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 0x40490FDB, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x00000001, 0x7FC00000, 0x12345678, -0x12345678, 40]

# %r1 is the thread, %rd2 its place in the output, %r2 and %r3 its inputs.
KERNEL = """
.visible .entry tried_kernel(
	.param .u64 .ptr .global .align 1 tried_kernel_param_0,
	.param .u64 .ptr .global .align 1 tried_kernel_param_1
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<30>;
	.reg .b64 	%rd<9>;
	.loc	1 7 4                           // tried.py:7:4
	ld.param.b64 	%rd1, [tried_kernel_param_0];
	ld.param.b64 	%rd3, [tried_kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
	mad.wide.u32 	%rd4, %r1, 8, %rd3;
	ld.global.v2.b32 	{%r2, %r3}, [ %rd4 + 0 ];
	shl.b32 	%r5, %r1, 2;
	xor.b32 	%r6, %r5, 128;
BODY
	st.global.b32 	[ %rd2 + 0 ], { %r4 };
	ret;
}
"""


def inputs() -> torch.Tensor:
    """Pairs of hostile words, `[threads, 2]` int32."""
    first = torch.tensor(WORDS, dtype=torch.int32).repeat(THREADS // len(WORDS))
    return torch.stack([first, first.roll(5) ^ torch.arange(THREADS, dtype=torch.int32)], 1).contiguous()


def run(body: str) -> list[int]:
    """What each thread leaves in %r4, as a number without sign."""
    out, memory, code = torch.zeros(THREADS, dtype=torch.int32), GlobalMemory(), parse(KERNEL.replace("BODY", body))
    given = [memory.add(tensor) for tensor in (out, inputs())]
    run_programs(code, dict(zip((parameter.name for parameter in code.parameters), given, strict=True)), {}, memory, 512, (1,))
    return [word % 2**32 for word in out.tolist()]


def signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def real(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def rounded(word: int, dtype: torch.dtype) -> int:
    """By torch, but for the one NaN of PTX."""
    return 0x7FFF if math.isnan(real(word)) else int(torch.tensor(signed(word), dtype=torch.int32).view(torch.float32).to(dtype).view(torch.int16)) % 2**16


# By Python's own numbers, which have no width: of %r2 and %r3 as they lie.
NUMBERS: dict[str, Callable[[int, int], int]] = {
    "add.s32 %r4, %r2, %r3;": lambda a, b: a + b,
    "sub.s32 %r4, %r2, %r3;": lambda a, b: a - b,
    "mul.lo.s32 %r4, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.s32 %r4, %r2, %r3;": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %r4, %r2, %r3;": lambda a, b: a * b >> 32,
    "mad.lo.s32 %r4, %r2, %r3, -5;": lambda a, b: a * b - 5,
    "mul.wide.s32 %rd5, %r2, %r3; shr.u64 %rd6, %rd5, 32; cvt.u32.u64 %r4, %rd6;": lambda a, b: signed(a) * signed(b) >> 32,
    "div.s32 %r4, %r2, -7;": lambda a, b: int(signed(a) / -7),
    "rem.s32 %r4, %r2, -7;": lambda a, b: int(math.fmod(signed(a), -7)),
    "min.s32 %r4, %r2, %r3;": lambda a, b: min(signed(a), signed(b)),
    "max.u32 %r4, %r2, %r3;": max,
    "min.relu.s32 %r4, %r2, %r3;": lambda a, b: max(min(signed(a), signed(b)), 0),
    "shl.b32 %r4, %r2, 33;": lambda a, b: 0,
    "shl.b32 %r4, %r2, 31;": lambda a, b: a << 31,
    "shr.u32 %r4, %r2, 32;": lambda a, b: 0,
    "shr.s32 %r4, %r2, 99;": lambda a, b: signed(a) >> 31,
    "bfe.u32 %r4, %r2, 3, 7;": lambda a, b: a >> 3 & 127,
    "bfe.s32 %r4, %r2, 8, 8;": lambda a, b: (a >> 8 & 127) - (a >> 8 & 128),
    "not.b32 %r4, %r2;": lambda a, b: ~a,
    "prmt.b32 %r4, %r2, %r3, 0x7140;": lambda a, b: a & 255 | (b & 255) << 8 | (a >> 8 & 255) << 16 | (b >> 24) << 24,
    "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r4, {%rs2, %rs1};": lambda a, b: a >> 16 | a << 16,
    "setp.lt.s32 %p1, %r2, %r3; selp.b32 %r4, 1, 0, %p1;": lambda a, b: signed(a) < signed(b),
    "setp.lt.u32 %p1, %r2, %r3; selp.b32 %r4, 1, 0, %p1;": lambda a, b: a < b,
    "setp.lt.f32 %p1, %r2, %r3; selp.b32 %r4, 1, 0, %p1;": lambda a, b: real(a) < real(b),
    "setp.geu.f32 %p1, %r2, %r3; selp.b32 %r4, 1, 0, %p1;": lambda a, b: not real(a) < real(b),
    "cvt.rn.f16.f32 %rs1, %r2; cvt.u32.u16 %r4, %rs1;": lambda a, b: rounded(a, torch.float16),
    "cvt.rn.bf16x2.f32 %r4, %r2, %r2;": lambda a, b: rounded(a, torch.bfloat16) * 65537,
    "{ .reg .b32 twice; add.s32 twice, %r2, %r2; { .reg .b32 twice; mov.b32 twice, 5; } mov.b32 %r4, twice; }": lambda a, b: 2 * a,
}  # fmt: skip


@pytest.mark.parametrize("body", NUMBERS)
def test_numbers_are_those_of_python(body: str) -> None:
    pairs = [(a % 2**32, b % 2**32) for a, b in inputs().tolist()]
    assert run(body) == [int(NUMBERS[body](a, b)) % 2**32 for a, b in pairs]


# Which thread's number each thread has then.
LANES: dict[str, Callable[[int], int]] = {
    "shfl.sync.bfly.b32 %r4, %r1, 3, 31, -1;": lambda i: i ^ 3,
    "shfl.sync.up.b32 %r4, %r1, 4, 0, -1;": lambda i: i - 4 if i % 32 >= 4 else i,
    "shfl.sync.down.b32 %r4, %r1, 4, 31, -1;": lambda i: i + 4 if i % 32 < 28 else i,
    "shfl.sync.idx.b32 %r4, %r1, 5, 31, -1;": lambda i: i // 32 * 32 + 5,
    "setp.lt.u32 %p1, %r1, 9; mov.b32 %r4, 70; @%p1 bra $L; mov.b32 %r4, %r1; $L: add.s32 %r4, %r4, 1;": lambda i: 71 if i < 9 else i + 1,
    "mov.b32 %r4, 0; $L: add.s32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 6; @%p1 bra $L;": lambda i: 6,
    # By way of shared memory, from the other warp.
    "mov.b32 %r7, global_smem; add.s32 %r8, %r7, %r5; st.shared.b32 [%r8], %r1; bar.sync 0; ld.shared.b32 %r4, [%r6];": lambda i: i ^ 32,
}


@pytest.mark.parametrize("body", LANES)
def test_lanes_and_branches(body: str) -> None:
    assert run(body) == [LANES[body](i) for i in range(THREADS)]


# Each lane copies its own first input to shared memory, and arrives at a barrier with it.
BARRIER = "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [global_smem+256], 64; bar.sync 0; "
COPY = "cp.async.ca.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x4, 0x4; "
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [global_smem+256]; "
WAIT = "{ .reg .pred complete; waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [global_smem+256], 0; @!complete bra.uni waitLoop; } "
READ = "ld.shared.b32 %r4, [%r6];"


def test_copies_by_lanes_are_there_when_they_were_waited_for() -> None:
    first = [a % 2**32 for a in inputs()[:, 0].tolist()]
    assert run(BARRIER + COPY + ARRIVE + WAIT + READ) == [first[i ^ 32] for i in range(THREADS)]


RACES = {
    "a read of what another warp stores": "st.shared.b32 [%r5], %r1; ld.shared.b32 %r4, [%r6];",
    "a store over what another warp reads": "mov.b32 %r4, 0; ld.shared.b32 %r7, [%r5]; st.shared.b32 [%r6], %r1;",
    "two warps that store to one place": "mov.b32 %r4, 0; and.b32 %r7, %r5, 127; st.shared.b32 [%r7], %r1;",
    "a copy that is not waited for": BARRIER + COPY + ARRIVE + READ,
    "a copy over what another warp reads": BARRIER + "ld.shared.b32 %r4, [%r6]; " + COPY + ARRIVE + WAIT,
    "a barrier that is not known to be made": BARRIER.replace("bar.sync 0; ", "") + COPY + ARRIVE + WAIT + READ,
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found(name: str) -> None:
    with pytest.raises(Race, match=r"nothing orders the two \(\S+ in line 2\d of the PTX, made of tried\.py:7:4\)"):
        run(RACES[name])


def test_warps_that_store_the_same_to_one_place_do_not_race() -> None:
    assert run("mov.b32 %r4, 3; and.b32 %r7, %r5, 127; st.shared.b32 [%r7], %r4; bar.sync 0; ld.shared.b32 %r4, [%r7];") == [3] * THREADS


FAULTS = {
    "mov.b32 %r4, %r9;": "%r9 is read before anything was written to it",
    "sin.approx.f32 %r4, %r2;": "sin.approx.f32 %r4, %r2 is not known here",
    "add.sat.s32 %r4, %r2, %r3;": "add.sat.s32 %r4, %r2, %r3 is not known here",
    "ld.shared.b32 %r4, [%r5+512];": "an access at 512 of shared memory, out of bounds of its 512 bytes",
    "ld.shared.b32 %r4, [%r5+2];": "not at a multiple of itself",
    "ld.global.b32 %r4, [ %rd2 + 4 ];": "an access of 4 bytes at 0x10000000100 of global memory, out of bounds of every buffer",
    "ld.global.b32 %r4, [ %rd2 + -4 ];": "out of bounds of every buffer",
    "ld.global.b32 %r4, [ %rd2 + 2 ];": "which is no multiple of them",
    "$L: setp.lt.u32 %p1, %r1, 9; @%p1 bra $L;": "threads part at a branch that does not skip forward",
    "setp.lt.u32 %p1, %r1, 9; @%p1 bra $L; bar.sync 0; $L: mov.b32 %r4, 0;": "only some threads come to what is for all of them",
    BARRIER + WAIT: "which would hang: parity 0 runs, 64 arrivals and 0 bytes are to come",
    BARRIER.replace("64;", "128;") + ARRIVE + "mov.b32 %r4, 0;": "the program ends with 64 of 128 arrivals and 0 bytes to come",
    BARRIER.replace("64;", "48;") + ARRIVE + "mov.b32 %r4, 0;": "32 arrivals at the barrier at 256, which waits for 16 more of 48",
    BARRIER + COPY + "mov.b32 %r4, 0;": "the program ends with copies by lanes in flight",
    BARRIER + "ld.shared.b32 %r4, [global_smem+256];": "which is a barrier's",
    BARRIER + "@%p1 mbarrier.init.shared::cta.b64 [global_smem+256], 64;": "is made a second time",
    ARRIVE: "there is no barrier at 256",
}


@pytest.mark.parametrize("body", FAULTS)
def test_a_fault_is_found(body: str) -> None:
    with pytest.raises(Fault, match=re.escape(FAULTS[body])) as found:
        run(body)
    assert not isinstance(found.value, Race)
