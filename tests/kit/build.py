"""Ahead-of-time builds of Triton kernels for GPUs that are not here, and what each costs in registers, spills and shared memory.

A variant is taken from a real launch: the launcher runs on host tensors with its kernel replaced by a recorder, and the recorded arguments are specialized as
Triton would (dtypes, integers that are 1, divisibility by 16).
"""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atoll.ops.attention import BatchShape, DecodeConfig, DecodeSpec, gluon_decode_sm90, plan_decode, triton_append, triton_decode
from atoll.ops.attention.plan import DecodePlan, make_workspace
from atoll.probe import Case
from atoll.probe.cases import DecodeProblem

# `atoll.ops.attention.combine`, the module, not its function.
combine = import_module("atoll.ops.attention.combine")

# What one program may take of a compute unit's shared memory (LDS), bytes.
SHARED_LIMITS = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64)}

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel."""

    kernel: Any  # triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """What one kernel variant takes of one target."""

    kernel: str
    target: str
    registers: int  # per thread; VGPRs on AMD
    spill_bytes: int  # per thread
    shared_bytes: int  # per program
    ptx: str = field(default="", repr=False)  # NVIDIA's alone
    pointers: tuple[str, ...] = ()  # the kernel's, in order

    @property
    def fault(self) -> str | None:
        """Why this variant is not good enough to ship."""
        if self.spill_bytes:
            return f"{self.kernel} spills {self.spill_bytes} bytes a thread on {self.target}; take a smaller tile, fewer stages or more warps"
        limit = SHARED_LIMITS[self.target]
        if self.shared_bytes > limit:
            return f"{self.kernel} takes {self.shared_bytes} bytes of shared memory, {self.target} has {limit}; take a smaller tile or fewer stages"
        return None


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in _LAUNCH_OPTIONS if name in kwargs}
            arguments = inspect.signature(self.kernel.fn).bind(*args, **kwargs).arguments
            self.launches.append(Launch(self.kernel, dict(arguments), options, grid))

        return record


def decode_launches(spec: DecodeSpec, target: str) -> list[Launch]:
    """The split and combine kernels as the Triton backend would launch them for a middling batch on that target."""
    return _decode_launches(triton_decode, "decode_split_kernel", spec, target, 16, 16384)


def merge_launches(spec: DecodeSpec, target: str) -> list[Launch]:
    """The combine kernel for a long sequence's many splits."""
    return _decode_launches(triton_decode, "decode_split_kernel", spec, target, 1, 65536)[1:]


def gluon_launches(spec: DecodeSpec, target: str) -> list[Launch]:
    """The Hopper backend's kernels, with every tuning that it has: for a middling batch, some that fill the device, a long sequence alone.

    Without prefetching there is less of them.
    """
    shapes = ((16, 16384), (64, 1024), (64, 4096), (256, 1024), (256, 16384), (1, 65536))
    found: dict[object, Launch] = {}
    for batch, seq_len in shapes:
        for launch in _decode_launches(gluon_decode_sm90, "decode_hopper_kernel", spec, target, batch, seq_len):
            arguments = launch.arguments
            found.setdefault((launch.kernel, *(arguments.get(name) for name in ("TILE", "STAGES", "NUM_WARPS", "SPLIT", "CHUNK"))), launch)
    return list(found.values())


def alone_launches(spec: DecodeSpec, target: str, num_sms: int = 132) -> list[Launch]:
    """The Hopper backend's split kernel for a call of two sequences on a GPU of so many multiprocessors."""
    with mock.patch.object(gluon_decode_sm90, "num_sms", return_value=num_sms):
        launches = _decode_launches(gluon_decode_sm90, "decode_hopper_kernel", spec, target, 16, 1024)
    return [launch for launch in launches if "ALONE" in launch.arguments]


def balanced_launches(spec: DecodeSpec, target: str) -> list[Launch]:
    """The Hopper backend's kernel of one launch, two programs a multiprocessor."""
    config = gluon_decode_sm90.config(spec, BatchShape(16, 16384, 132))
    config = gluon_decode_sm90.one_launch(spec, config, 264)
    return _decode_launches(gluon_decode_sm90, "decode_balanced_kernel", spec, target, 16, 16384, config)


def _decode_launches(
    backend: ModuleType, kernel: str, spec: DecodeSpec, target: str, batch: int, seq_len: int, config: DecodeConfig | None = None
) -> list[Launch]:
    config = config or backend.config(spec, BatchShape(batch=batch, max_seq_len=seq_len, num_sms=132, amd=not target.startswith("sm_")))
    return record_decode(backend, kernel, Case(spec, (40, 200)).make(), target, config).launches


@dataclass(frozen=True)
class RecordedDecode:
    """A call of a backend that only recorded its launches, and the tensors that they write."""

    launches: list[Launch]
    plan: DecodePlan
    out: torch.Tensor  # NaN, as the workspace is
    lse: torch.Tensor


def record_decode(backend: ModuleType, kernel: str, problem: DecodeProblem, target: str, config: DecodeConfig) -> RecordedDecode:
    """What a backend would launch for a problem on that target."""
    spec, nvidia = problem.spec, target.startswith("sm_")
    # The plan only makes the workspace here; this host cannot run the Triton backend.
    plan = plan_decode(spec, problem.seq_lens, problem.page_table, backend="reference")
    plan = replace(plan, config=config, **make_workspace(spec, plan.batch, config, plan.seq_lens.device))
    out, lse = torch.full_like(problem.q, torch.nan), torch.full(problem.q.shape[:3], torch.nan)
    for workspace in (plan.partial_o, plan.partial_lse):
        workspace.fill_(torch.nan)

    def launch_options(_: torch.device, max_registers: int | None = None) -> dict[str, int | bool]:
        registers = {"maxnreg": max_registers} if max_registers is not None else {}
        return {"launch_pdl": True, **registers} if nvidia else {}

    with ExitStack() as stack:
        for module in (backend, combine):
            stack.enter_context(mock.patch.object(module, "has_dependent_launch", return_value=nvidia))
            stack.enter_context(mock.patch.object(module, "launch_options", launch_options))
        launches = stack.enter_context(recorded_launches((backend, kernel), (combine, "combine_kernel")))
        backend.decode(problem.q, problem.kv, plan, out, lse, problem.sinks)
    return RecordedDecode(launches, plan, out, lse)


def append_launches(spec: DecodeSpec, target: str) -> list[Launch]:
    """The append kernel, which is the same on every target."""
    kv = Case(spec, (40,)).make().kv
    rows = torch.zeros(8, spec.num_kv_heads, spec.head_dim, dtype=spec.q_dtype)
    with recorded_launches((triton_append, "append_kv_kernel")) as launches:
        triton_append.append_kv_triton(kv, rows, rows, torch.zeros(8, dtype=torch.int64))
    return launches


def build_costs(launches_of: Callable[[DecodeSpec, str], list[Launch]], spec: DecodeSpec, target: str, **options: int) -> list[Cost]:
    """Build all kernels that a launcher launches for a spec; `options` replace launch options."""
    return [build(replace(launch, options=launch.options | options), target) for launch in launches_of(spec, target)]


@contextmanager
def recorded_launches(*kernels: tuple[ModuleType, str]) -> Iterator[list[Launch]]:
    """Replace kernels, given as (module, name), by recorders."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module, name in kernels:
            stack.enter_context(mock.patch.object(module, name, _Recorder(getattr(module, name), launches)))
        yield launches


def passed(launch: Launch) -> list[tuple[str, Any]]:
    """The arguments that the compiled kernel still takes, in order: not what it was specialized for."""
    kept = []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        one = not parameter.do_not_specialize and isinstance(value, int) and value == 1
        if not (parameter.is_constexpr or value is None or one):
            kept.append((parameter.name, value))
    return kept


def build(launch: Launch, target: str) -> Cost:
    """Compile for a target and read the cost off the result."""
    constants: dict[str, Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    kept = dict(passed(launch))
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialize = not parameter.do_not_specialize
        if parameter.name not in kept:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_name(value)
        # An allocator aligns to 16 bytes; a view into a buffer is aligned by its layout.
        if specialize and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    name = launch.kernel.fn.__name__
    if "cubin" in compiled.asm:
        pointers = tuple(parameter for parameter, kind in signature.items() if kind.startswith("*"))
        return Cost(name, target, *_cubin_cost(compiled.asm["cubin"]), compiled.metadata.shared, compiled.asm["ptx"], pointers)
    return Cost(name, target, *_amdgcn_cost(compiled.asm["amdgcn"]), compiled.metadata.shared)


def uncounted(ptx: str) -> list[str]:
    """What keeps a count of arrivals in PTX from saying that all that the counting program stored is there for whoever reads the count.

    The interpreter runs programs one after another, and sees none of it.
    """
    steps = re.findall(r"\b(?:bar\.sync|(?:st|ld|atom)\.global[.\w]*)", ptx)
    counts = [i for i, step in enumerate(steps) if step.startswith("atom")]
    faults = [] if counts else ["nothing is counted"]
    for i in counts:
        if ".gpu." not in steps[i] or ".acq_rel." not in steps[i]:
            faults.append(f"{steps[i]} orders nothing for other programs")
        if steps[i - 1] != "bar.sync":
            faults.append(f"{steps[i - 1]} and then a count, before all threads have met")
        if steps[i + 1] != "bar.sync":
            faults.append(f"a count and then {steps[i + 1]}, before all threads know it")
        # The next two steps are the meeting and the count set back; then whoever came last reads.
        if not steps[i + 3].startswith("ld.global.cg"):
            faults.append(f"a count and then {steps[i + 3]}, from this multiprocessor's own cache")
    return faults


def steps_before_wait(cost: Cost) -> list[str]:
    """What a kernel does to global memory, and lets others do, before it waits for the kernel before it; with the pointers that an address is made of."""
    assert "griddepcontrol.wait" in cost.ptx, f"{cost.kernel} never waits for the kernel before it"
    before = cost.ptx.split("griddepcontrol.wait")[0]
    steps = re.findall(r"\b(griddepcontrol\.\w+|cp\.async\.bulk[.\w:]*|(?:st|ld|atom|red)\.global[.\w]*)(?:[^;\[]*\[\s*(%rd\d+))?", before)
    # Triton adds pointers of its own after the kernel's.
    named = dict(zip(re.findall(r"\.param \.u64 \.ptr [^,)]*?(\w+_param_\d+)", cost.ptx), cost.pointers, strict=False))
    return [" ".join([step, *(named[source] for source in named if source in _made_of(address, before))]) for step, address in steps]


def _made_of(operand: str, ptx: str) -> set[str]:
    """Registers and parameters behind a register."""
    found = {operand}
    for instruction in re.findall(rf"^\s*[\w.]+\s+{re.escape(operand)},(.*);", ptx, re.MULTILINE):
        found = found.union(*(_made_of(source, ptx) for source in re.findall(r"%r\w*\d+|\w+_param_\d+", instruction)))
    return found


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{canonicalize_dtype(value.base.dtype)}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _cubin_cost(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes: Triton has no local arrays, so that all stack is spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _amdgcn_cost(assembly: str) -> tuple[int, int]:
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in the compiler's output"
    return int(found.group(1))
