"""Worker processes in which Triton interprets kernels on the CPU: the choice is made when Triton is imported, once for a process."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from atoll.ops.attention import DecodeConfig
from atoll.probe import BackendAdapter, Case, CaseReport, probe_case

WORKERS = 2

P = ParamSpec("P")
T = TypeVar("T")


class InterpreterPool:
    """Runs module-level functions in processes that interpret Triton kernels."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn"))

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        # A worker takes its environment when it starts, which is at a submit.
        with _interpret_flag():
            return self._pool.submit(function, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def _interpret_flag() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def probe_interpreted(case: Case, config: DecodeConfig | None, fills: tuple[str, ...]) -> CaseReport:
    """The Triton backend, interpreted, on one case."""
    return probe_case(BackendAdapter("triton", config), case, fills=fills)
