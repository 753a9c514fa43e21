"""Hostile cases of the delta step: states at odd strides in a poisoned buffer, rows without a sequence, and the comparison of two ways to step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from atoll.ops.delta import DeltaSpec, StepTrace, gate, make_trace
from atoll.ops.delta.step import delta_step_torch
from tests.kit.mutation import Edit, load_source, mutated_source

# plain: a tensor for each state; slot_major: all state of a slot in one span of bytes, of two layers; odd: gaps, and the conv state with channels innermost.
LAYOUTS = ("plain", "slot_major", "odd")
FILLS = ("zero", "nan", "inf", "random")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_SLOTS = 6
BITS = {2: torch.int16, 4: torch.int32}

# As delta_step_torch.
Step = Callable[..., None]


@dataclass(frozen=True)
class StepProblem:
    """The tensors of one step."""

    spec: DeltaSpec
    mixed_qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    conv_weight: torch.Tensor
    conv_states: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    query_lens: torch.Tensor | None
    out: torch.Tensor
    trace: StepTrace | None

    def run(self, step: Step) -> "StepProblem":
        step(
            *(self.spec, self.mixed_qkv, self.g, self.beta, self.conv_weight, self.conv_states, self.states),
            *(self.slots, self.query_lens, self.out, self.trace),
        )
        return self

    def written(self) -> dict[str, torch.Tensor]:
        """All that a step may write to."""
        tensors = {"out": self.out, "conv_states": self.conv_states, "states": self.states}
        if self.trace is not None:
            tensors |= {"trace.states": self.trace.states, "trace.conv_inputs": self.trace.conv_inputs}
        return tensors

    def answers(self, i_b: int) -> dict[str, torch.Tensor]:
        """The part of it that belongs to one sequence."""
        return {name: part.cpu() for name, part in self.owned(self.written(), i_b).items()}

    def owned(self, tensors: dict[str, torch.Tensor], i_b: int) -> dict[str, torch.Tensor]:
        n, slot = self.num_tokens(i_b), int(self.slots[i_b])
        if n == 0:
            return {"out": tensors["out"][i_b]}
        parts = {"out": tensors["out"][i_b], "conv_states": tensors["conv_states"][slot], "states": tensors["states"][slot]}
        if self.trace is not None:
            parts["trace.states"] = tensors["trace.states"][i_b, :n]
            parts["trace.conv_inputs"] = tensors["trace.conv_inputs"][i_b, :, : self.spec.conv_width - 1 + n]
        return parts

    def unowned_bytes(self) -> dict[str, torch.Tensor]:
        """Of the storage under each tensor, gaps and spare slots included, the bytes that belong to no sequence."""
        marks: dict[int, torch.Tensor] = {}
        twins = {}
        for name, tensor in self.written().items():
            storage = tensor.untyped_storage()
            mark = marks.setdefault(storage.data_ptr(), torch.zeros(storage.nbytes(), dtype=torch.uint8))
            twins[name] = torch.as_strided(mark.view(BITS[tensor.itemsize]), tensor.shape, tensor.stride(), tensor.storage_offset())
        for i_b in range(len(self.slots)):
            for part in self.owned(twins, i_b).values():
                part.fill_(-1)
        unowned = {}
        for name, tensor in self.written().items():
            stored = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            unowned[name] = stored.cpu()[marks[tensor.untyped_storage().data_ptr()] == 0]
        return unowned

    def num_tokens(self, i_b: int) -> int:
        lens = self.query_lens if self.query_lens is not None else torch.full_like(self.slots, self.mixed_qkv.shape[1])
        return int(lens[i_b]) if self.slots[i_b] >= 0 else 0


@dataclass(frozen=True)
class StepCase:
    """One call of a step; the same every time it is made, but for what fills every place that no sequence owns."""

    spec: DeltaSpec
    slots: tuple[int, ...]
    query_len: int = 1
    query_lens: tuple[int, ...] | None = None
    layout: str = "plain"
    trace: bool = False
    owned_nan: bool = False  # in the first sequence's state at [0, 0, 0], and in the last channel of its last token

    @property
    def name(self) -> str:
        s = self.spec
        dims = f"HK{s.num_k_heads}-HV{s.num_v_heads}-DK{s.k_head_dim}-DV{s.v_head_dim}-W{s.conv_width}"
        options = [self.layout, *(["ragged"] if self.query_lens else []), *(["trace"] if self.trace else []), *(["nan"] if self.owned_nan else [])]
        return f"{dims}-{str(s.dtype).removeprefix('torch.')}-ql{self.query_len}-{'-'.join(options)}"

    def make(self, device: str = "cpu", fill: str = "nan") -> StepProblem:
        spec, batch = self.spec, len(self.slots)
        rng = torch.Generator().manual_seed(0)
        mixed = torch.randn((batch, self.query_len, spec.conv_dim), generator=rng)
        a, b = torch.randn((2, batch, self.query_len, spec.num_v_heads), generator=rng)
        g, beta = gate(a, b, torch.rand(spec.num_v_heads, generator=rng), torch.rand(spec.num_v_heads, generator=rng))
        weight = torch.randn((spec.conv_dim, spec.conv_width), generator=rng).to(spec.dtype)
        conv_states, states = self._slots(device, fill)
        # With a spare row after the last, for the same reason as the spare slots.
        spare_out = torch.empty((batch + 1, self.query_len, spec.num_v_heads, spec.v_head_dim), dtype=spec.dtype, device=device)
        spare = make_trace(spec, batch + 1, self.query_len, device)
        for tensor in (spare_out, spare.states, spare.conv_inputs):
            fill_tensor(tensor, fill)
        out, trace = spare_out[:-1], StepTrace(spare.states[:-1], spare.conv_inputs[:-1]) if self.trace else None
        lens = self.query_lens if self.query_lens is not None else (self.query_len,) * batch
        for i_b, slot in enumerate(self.slots):
            for tensor in (mixed, g, beta):
                # What a padded row or token holds is nobody's.
                fill_tensor(tensor[i_b, lens[i_b] if slot >= 0 else 0 :], fill)
            if slot >= 0:
                conv_states[slot] = torch.randn(spec.conv_state_shape, generator=rng).to(conv_states)
                states[slot] = torch.randn(spec.state_shape, generator=rng).to(states)
        if self.owned_nan:
            states[self.slots[0], 0, 0, 0] = math.nan
            mixed[0, lens[0] - 1, -1] = math.nan
        query_lens = torch.tensor(self.query_lens, dtype=torch.int32, device=device) if self.query_lens is not None else None
        slots = torch.tensor(self.slots, dtype=torch.int32, device=device)
        return StepProblem(
            *(spec, mixed.to(device, spec.dtype), g.to(device), beta.to(device), weight.to(device)), conv_states, states, slots, query_lens, out, trace
        )

    def _slots(self, device: str, fill: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Filled conv and recurrent states, with a spare slot before the first and one after the last, so that a stray access shows and does no harm."""
        spec, num_slots = self.spec, NUM_SLOTS + 2
        channels, width = spec.conv_state_shape
        if self.layout == "slot_major":
            conv_bytes = -(-channels * width * spec.dtype.itemsize // 16) * 16
            state_bytes = math.prod(spec.state_shape) * 4
            buffer = torch.empty((num_slots, 2 * (conv_bytes + state_bytes)), dtype=torch.uint8, device=device)
            second = conv_bytes + state_bytes
            conv = buffer[:, second : second + channels * width * spec.dtype.itemsize].view(spec.dtype).unflatten(1, (channels, width))
            states = buffer[:, second + conv_bytes :].view(torch.float32).unflatten(1, spec.state_shape)
        elif self.layout == "odd":
            conv = torch.empty((num_slots, width + 1, channels + 3), dtype=spec.dtype, device=device)[:, 1:, 2:-1].transpose(1, 2)
            heads, key_dim, value_dim = spec.state_shape
            states = torch.empty((num_slots, key_dim, heads + 1, value_dim + 4), device=device)[:, :, 1:, 4:].transpose(1, 2)
        else:
            conv = torch.empty((num_slots, channels, width), dtype=spec.dtype, device=device)
            states = torch.empty((num_slots, *spec.state_shape), device=device)
        for tensor in (conv, states):
            fill_tensor(torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0), fill)
        return conv[1:-1], states[1:-1]


def fill_tensor(tensor: torch.Tensor, fill: str) -> None:
    if fill == "random":
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)) * 100)
    else:
        tensor.fill_({"zero": 0.0, "nan": math.nan, "inf": math.inf}[fill])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.itemsize])


def differences(case: StepCase, step: Step, device: str = "cpu", fill: str = "random") -> list[str]:
    """What `step` leaves otherwise than the definition does: values up to rounding, and to the bit all that belongs to no sequence."""
    want, got = case.make(fill=fill).run(delta_step_torch), case.make(device, fill).run(step)
    before, after = case.make(fill=fill).unowned_bytes(), got.unowned_bytes()
    faults = {f"{name}: stray write" for name in before if not torch.equal(before[name], after[name])}
    tolerance = TOLERANCE[case.spec.dtype]
    for i_b in range(len(case.slots)):
        for name, part in want.answers(i_b).items():
            if not torch.allclose(got.answers(i_b)[name].float(), part.float(), rtol=tolerance, atol=tolerance, equal_nan=True):
                faults.add(f"{name}: wrong value")
    return sorted(faults)


def leaks(case: StepCase, step: Step, device: str = "cpu") -> list[str]:
    """Sequences whose answers change by a bit with what fills the places that nobody owns, or with the company that they are stepped in."""
    faults = []
    clean = case.make(device, "zero").run(step)
    for fill in FILLS[1:]:
        with filled_empty(fill):
            other = case.make(device, fill).run(step)
        faults += [f"sequence {i_b}: {fill}" for i_b in range(len(case.slots)) if not _same(clean.answers(i_b), other.answers(i_b))]
    for i_b in range(len(case.slots)):
        alone = _alone(case.make(device), i_b).run(step)
        if not _same(clean.answers(i_b), alone.answers(0)):
            faults.append(f"sequence {i_b}: alone")
    return faults


def filled_empty(fill: str) -> mock._patch:  # type: ignore[type-arg]
    """Workspaces come filled."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        if tensor.is_floating_point():
            fill_tensor(tensor, fill)
        return tensor

    return mock.patch.object(torch, "empty", filled)


def _alone(problem: StepProblem, i_b: int) -> StepProblem:
    row = slice(i_b, i_b + 1)
    trace = StepTrace(problem.trace.states[row], problem.trace.conv_inputs[row]) if problem.trace is not None else None
    lens = problem.query_lens[row] if problem.query_lens is not None else None
    inputs = (problem.mixed_qkv[row], problem.g[row], problem.beta[row], problem.conv_weight)
    return StepProblem(problem.spec, *inputs, problem.conv_states, problem.states, problem.slots[row], lens, problem.out[row], trace)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def interpreted_faults(case: StepCase, look_for_leaks: bool) -> list[str]:
    """Run in a process in which Triton interprets."""
    from atoll.ops.delta.triton_step import delta_step_triton

    return differences(case, delta_step_triton) + (leaks(case, delta_step_triton) if look_for_leaks else [])


def interpreted_mutation_faults(edits: tuple[Edit, ...], case: StepCase, directory: Path) -> list[str]:
    """The same of kernels with an error put in; `directory` must outlive the call."""
    step = mutated_delta("triton_step.py", edits, directory).delta_step_triton
    # Random bytes show a stray write, NaN a stray read.
    return differences(case, step) + differences(case, step, fill="nan")


def mutated_delta(file: str, edits: tuple[Edit, ...], directory: Path) -> ModuleType:
    """A copy of a module of `ops/delta` with an error put in."""
    return load_source(mutated_source(f"../delta/{file}", edits), directory / f"mutated_{file}")
