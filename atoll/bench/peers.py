"""A bench workload as the probe's problem, so that the probe's adapters can be timed."""

import torch

from atoll.bench.workload import Workload
from atoll.probe.cases import Case, DecodeProblem


def decode_problem(work: Workload) -> DecodeProblem:
    """Copy 0 of the workload. No region of it is named: it is for timing, never for poisoning."""
    size = work.shape.page_size
    table = work.tables[0].tolist()
    pages = tuple(tuple(row[: -(-n // size)]) for row, n in zip(table, work.lengths, strict=True))
    return DecodeProblem(
        case=Case(work.shape.spec(), tuple(work.lengths), max_seq_len=work.shape.ctx),
        q=work.q,
        kv=work.kv,
        seq_lens=torch.tensor(work.lengths, dtype=torch.int32),
        page_table=work.tables[0],
        sinks=None,
        pages=pages,
        buffer=torch.empty(0, dtype=torch.uint8, device=work.q.device),
        gaps=None,
        regions={},
    )
