"""Many cases over many processes: compiling a kernel takes a second or two of one core, running it a millisecond of the GPU."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

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
