"""The Hopper kernel, compiled and run through its PTX on one hostile case, whole or with something done to its text; for a process in which Triton compiles."""

import re
from dataclasses import dataclass

import torch

from atoll.ops.attention import DecodeConfig, gluon_decode_sm90
from atoll.probe import Case
from atoll.probe.cases import DecodeProblem
from atoll.probe.oracle import compare
from atoll.probe.poison import poison_cache
from tests.kit.build import Cost, RecordedDecode, build, record_decode
from tests.kit.ptx.faults import Fault, Race
from tests.kit.ptx.launch import launch_compiled

TARGET = "sm_90"


@dataclass(frozen=True)
class Cut:
    """What is taken out of a kernel's text, or put in its place: one of the places that a pattern fits."""

    pattern: str
    place: int = 0  # counted from the last where negative
    new: str = ""

    def apply(self, ptx: str) -> str:
        found = list(re.finditer(self.pattern, ptx, re.MULTILINE))
        assert found, f"{self.pattern} is nowhere in the PTX; adapt it to what the compiler writes now"
        start, end = found[self.place].span()
        # Lines keep their numbers.
        lines = "\n" * (ptx.count("\n", start, end) - self.new.count("\n"))
        return ptx[:start] + found[self.place].expand(self.new) + lines + ptx[end:]


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    fault: str | None  # the first, as text
    race: bool  # it is one
    ratio: float  # of the answer's error to its bound, NaN where the answer holds one; infinite after a fault
    num_counts_left: int = 0  # counts that programs of one launch did not set back
    num_steps: int = 0

    @property
    def clean(self) -> bool:
        return self.fault is None and self.ratio <= 1.0 and not self.num_counts_left


def judge(case: Case, config: DecodeConfig, cut: Cut | None = None) -> Verdict:
    """All that nobody owns holds NaN, the output and the workspace too. What is cut is cut from the first kernel."""
    problem = case.make()
    poison_cache(problem, "nan")
    recorded, costs = _built(problem, config)
    num_steps = 0
    try:
        for launch, cost in zip(recorded.launches, costs, strict=True):
            first = launch is recorded.launches[0]
            num_steps += launch_compiled(launch, cost, cut.apply(cost.ptx) if cut and first else None)
    except Fault as fault:
        return Verdict(str(fault), isinstance(fault, Race), torch.inf)
    counts = int(recorded.plan.arrivals.count_nonzero()) if config.num_programs else 0
    # The definition multiplies rows left of a window by zero, which NaN outlives: it is asked of a problem without.
    return Verdict(None, False, compare(case.make(), recorded.out, recorded.lse).ratio, counts, num_steps)


def judge_all(case: Case, config: DecodeConfig, pattern: str) -> list[Verdict]:
    """One verdict for each place that a pattern fits, that place taken out alone."""
    _, costs = _built(case.make(), config)
    return [judge(case, config, Cut(pattern, i)) for i in range(len(re.findall(pattern, costs[0].ptx, re.MULTILINE)))]


_costs: dict[tuple[Case, DecodeConfig], list[Cost]] = {}


def _built(problem: DecodeProblem, config: DecodeConfig) -> tuple[RecordedDecode, list[Cost]]:
    """The launches of a problem, and their kernels, which are compiled once for a process."""
    kernel = "decode_balanced_kernel" if config.num_programs else "decode_hopper_kernel"
    recorded = record_decode(gluon_decode_sm90, kernel, problem, TARGET, config)
    key = problem.case, config
    if key not in _costs:
        _costs[key] = [build(launch, TARGET) for launch in recorded.launches]
    return recorded, _costs[key]
