"""Many cases over many processes: compiling a kernel takes a second or two of one core, running it a millisecond of the GPU."""

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from atoll.probe.adapters import get_adapter
from atoll.probe.cases import Case
from atoll.probe.kernels import CaseReport, probe_case
from atoll.probe.poison import FILLS

MAX_PROCESSES = 16


def process_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Fresh processes: one that is forked from a process with a CUDA context cannot use the device."""
    count = processes or min(os.cpu_count() or 1, MAX_PROCESSES)
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def probe_by_name(adapter: str, case: Case, device: str, fills: Sequence[str] = FILLS, control: bool = True, tolerance: float = 1.0) -> CaseReport:
    """`probe_case` with arguments that can be sent to another process."""
    return probe_case(get_adapter(adapter), case, device=device, fills=fills, control=control, tolerance=tolerance)


def probe_in_processes(
    adapter: str,
    cases: Iterable[Case],
    *,
    device: str,
    fills: Sequence[str] = FILLS,
    control: bool = True,
    tolerance: float = 1.0,
    processes: int | None = None,
    on_case: Callable[[CaseReport], None] | None = None,
) -> list[CaseReport]:
    """`probe_backend` for an adapter by name, over processes. Reports in the order of the cases; `on_case` hears of them as they come.

    Raises BrokenProcessPool when a kernel takes its process down.
    """
    call = functools.partial(probe_by_name, fills=fills, control=control, tolerance=tolerance)
    with process_pool(processes) as pool:
        futures = [pool.submit(call, adapter, case, device) for case in cases]
        try:
            for future in as_completed(futures):
                if on_case is not None:
                    on_case(future.result())
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
