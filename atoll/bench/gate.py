"""What must hold before a decode call is timed: right numbers against the reference, and no unowned row in the result."""

from dataclasses import replace

import torch

from atoll.bench.workload import Workload, poison_rows, restore_rows, unowned_rows
from atoll.ops.attention import DecodePlan, decode_attention

# bf16 rounding of P, V and out gives 0.2 to 0.3 % on random rows; a wrong page or a missing tile gives far more. Whole-tile faults in a long
# sequence are the tests' business, which plant spikes for them.
MAX_REL_ERROR = 0.01


def relative_error(work: Workload, out: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` over a few sequences of copy 0. NaN where either has one."""
    chosen, ref = work.reference
    return ((out[chosen].float() - ref).norm() / ref.norm()).item()


def own_fault(work: Workload, plan: DecodePlan, out: torch.Tensor) -> tuple[float, str | None]:
    """The error of a kernel of ours, and why it may not be timed."""
    error = relative_error(work, out)
    if not error <= MAX_REL_ERROR:
        return error, above_limit(error, MAX_REL_ERROR)
    if plan.spec.mask_unowned_kv and leaks(work, plan):
        return error, "an unowned row reached the output"
    return error, None


def above_limit(error: float, limit: float) -> str:
    return f"error {error:.3g} against the reference is above {limit}"


def leaks(work: Workload, plan: DecodePlan) -> bool:
    """Whether NaN in page 0 and in every last page's unowned rows changes any bit of the output or lse of `plan`."""
    plan = replace(plan, page_table=work.tables[0])
    clean = decode_attention(work.q, work.kv, plan)
    pages, rows = unowned_rows(work)
    saved = poison_rows(work.kv, pages, rows)
    try:
        poisoned = decode_attention(work.q, work.kv, plan)
        return not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(clean, poisoned, strict=True))
    finally:
        restore_rows(saved, pages)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
