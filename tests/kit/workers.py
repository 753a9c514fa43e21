"""Worker processes in which Triton interprets kernels on the CPU, or compiles them: the choice is made when Triton is imported, once for a process."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import ParamSpec, TypeVar
from unittest import mock

import torch

from atoll.ops.attention import DecodeConfig
from atoll.probe import BackendAdapter, Case, CaseReport, probe_case
from atoll.probe.cases import with_flags
from atoll.probe.interpreter import repair_interpreter
from atoll.probe.kernels import Result, changed_rows, poison_everything

WORKERS = 2

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool:
    """Runs module-level functions in processes of their own."""

    def __init__(self, interpret: bool, workers: int = WORKERS) -> None:
        self._environment = {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
        # Repaired before the first task: else a worker's answers would depend on which tests it had run.
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=repair_interpreter if interpret else None)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        # A worker takes its environment when it starts, which is at a submit.
        with mock.patch.dict(os.environ, self._environment):
            return self._pool.submit(function, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def interpreting_pool() -> WorkerPool:
    return WorkerPool(interpret=True)


def compiling_pool(workers: int = WORKERS) -> WorkerPool:
    return WorkerPool(interpret=False, workers=workers)


def probe_interpreted(case: Case, config: DecodeConfig | None, fills: tuple[str, ...], backend: str = "triton") -> CaseReport:
    """A Triton or Gluon backend, interpreted, on one case."""
    return probe_case(BackendAdapter(backend, config), case, fills=fills)


def rows_changed_by_flag(case: Case, backend: str, config: DecodeConfig | None = None, device: str | torch.device = "cpu") -> int:
    """Rows of out or lse that have other bits without `mask_unowned_kv`, where all that nobody owns is zeros."""

    def answer(flagged: Case) -> Result:
        problem = flagged.make(device)
        run = BackendAdapter(backend, config)(problem)
        poison_everything(problem, run, "zero", seed=0)
        return run()

    return int(changed_rows(answer(case), answer(with_flags(case, mask_unowned_kv=False))).sum())
