"""A sequence alone and in its batch, on one cache."""

from dataclasses import replace

import torch

from atoll.ops.attention import DecodeConfig
from atoll.probe import BackendAdapter, Case, DecodeProblem
from atoll.probe.kernels import changed_rows, poison_everything


def answer(backend: str, problem: DecodeProblem, config: DecodeConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse with every unowned byte zero."""
    run = BackendAdapter(backend, config)(problem)
    poison_everything(problem, run, "zero", seed=0)
    out, lse = run()
    assert lse is not None
    return out, lse


def alone_in_batch(problem: DecodeProblem, i_b: int) -> DecodeProblem:
    """The same cache, with one sequence of the batch."""
    only = slice(i_b, i_b + 1)
    return replace(
        problem,
        case=replace(problem.case, seq_lens=problem.case.seq_lens[only]),
        q=problem.q[only].clone(),
        seq_lens=problem.seq_lens[only],
        page_table=problem.page_table[only],
        pages=problem.pages[only],
    )


def rows_changed_alone(backend: str, case: Case, config: DecodeConfig | None = None, device: torch.device | str = "cpu") -> int:
    """Rows of out or lse that differ in any bit between the batch and each of its sequences alone."""
    crowd = case.make(device)
    together = answer(backend, crowd, config)
    changed = 0
    for i_b in range(len(crowd.pages)):
        only = slice(i_b, i_b + 1)
        changed += int(changed_rows((together[0][only], together[1][only]), answer(backend, alone_in_batch(crowd, i_b), config)).sum())
    return changed
