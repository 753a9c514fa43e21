"""What must hold before a decode call is timed: right numbers against the reference, and no unowned row in the result."""

from dataclasses import replace

import torch

from atoll.bench.workload import Workload, poison_rows, restore_rows, unowned_rows
from atoll.ops.attention import DecodePlan, decode_attention, plan_decode

# bf16 rounding of P, V and out gives 0.2 to 0.3 % on random rows; a wrong page or a missing tile gives far more. Whole-tile faults in a long
# sequence are the tests' business, which plant spikes for them.
MAX_REL_ERROR = 0.01
_SEQUENCES = 3


def relative_error(work: Workload, out: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` over a few sequences of copy 0, the reference in fp32 from the same stored rows. NaN where either has one."""
    batch = work.shape.batch
    chosen = sorted({0, batch // 2, batch - 1})[:_SEQUENCES]
    spec = replace(work.shape.spec(), q_dtype=torch.float32)
    plan = plan_decode(spec, [work.lengths[i] for i in chosen], work.tables[0, chosen], backend="reference")
    ref, _ = decode_attention(work.q[chosen].float(), work.kv, plan)
    return ((out[chosen].float() - ref).norm() / ref.norm()).item()


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
