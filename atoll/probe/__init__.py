"""Probe: proves the ownership promise on decode kernels, ours and others', and on a whole engine."""

from atoll.probe.adapters import ADAPTERS, Adapter, BackendAdapter, Run, get_adapter, load_adapter
from atoll.probe.cases import Case, DecodeProblem, hostile_lengths, make_problem
from atoll.probe.kernels import CaseReport, Leak, probe_backend, probe_case, summary_rows
from atoll.probe.matrix import matrix
from atoll.probe.poison import FILLS

__all__ = [
    "ADAPTERS",
    "FILLS",
    "Adapter",
    "BackendAdapter",
    "Case",
    "CaseReport",
    "DecodeProblem",
    "Leak",
    "Run",
    "get_adapter",
    "hostile_lengths",
    "load_adapter",
    "make_problem",
    "matrix",
    "probe_backend",
    "probe_case",
    "summary_rows",
]
