"""`atoll probe`: the ownership promise, tried on decode kernels and on a whole engine."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.cli.base import EXIT_ERROR, EXIT_FOUND, fail, stderr_console, stdout_console, torch_device, write_json
from atoll.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from atoll.probe import CaseReport
    from atoll.probe.cases import Case

MAX_JOBS = 16
SHOWN_FAULTS = 20

probe_app = typer.Typer(no_args_is_help=True, help="Try the promise that output depends on owned rows only.")


@probe_app.command("kernels")
def probe_kernels(
    backend: Annotated[str | None, typer.Option(help="One of ours: triton, reference.", show_default=False)] = None,
    adapter: Annotated[str | None, typer.Option(help="Anybody's: a shipped adapter's name, or module:function.", show_default=False)] = None,
    matrix: Annotated[Literal["quick", "full"], typer.Option(help="Cases that meet each feature once, or all.")] = "quick",
    mask_unowned_kv: Annotated[bool, typer.Option(help="False asks for the old contract, which must leak.")] = True,
    fills: Annotated[str | None, typer.Option(help="Comma-separated, of 0x7f, 0xff, nan, inf, max, random, stale.", show_default="all")] = None,
    name_filter: Annotated[str, typer.Option("--filter", help="Only cases whose name contains this.")] = "",
    tolerance: Annotated[float, typer.Option(help="Times the error bound, for kernels that compute in fp8.")] = 1.0,
    jobs: Annotated[int | None, typer.Option(help="Processes.", min=1, show_default="on a GPU one per core, 16 at most; else 1")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines: one per leak, wrong answer or refusal, then a summary.")] = False,
) -> None:
    """Fill every place that no sequence owns with hostile bytes; not one bit of the output may change.

    Exits with 0 when all cases are clean, 1 when one leaks, answers wrongly or swallows a NaN that a sequence owns, 2 when nothing could be run.
    With TRITON_INTERPRET=1 in the environment, Triton kernels run on a CPU.
    """
    if (backend is None) == (adapter is None):
        fail("give one of --backend (triton, reference) and --adapter (leaky_control, flashinfer_xqa, ..., or module:function)")
    name = backend or adapter or ""
    target = torch_device(device)
    cases = _cases(matrix, name_filter, mask_unowned_kv=mask_unowned_kv, short=_interpreted())
    chosen_fills = _fills(fills)
    num_jobs = min(len(cases), jobs or (min(MAX_JOBS, os.cpu_count() or 1) if target.type == "cuda" else 1))
    work = [_Work(name, case, target, chosen_fills, tolerance) for case in cases]
    reports = _run(work, num_jobs)
    counts = {status: sum(report.status == status for report in reports) for status in ("clean", "leak", "wrong", "control", "refused")}
    if as_json:
        _write_json(reports, counts, name, target)
    else:
        _print(reports, counts, chosen_fills, name, target)
    if counts["refused"] == len(reports):
        raise typer.Exit(EXIT_ERROR)
    # Others may take what they like; ours must take every case of the matrix.
    refused_by_ours = counts["refused"] if backend is not None else 0
    if counts["leak"] + counts["wrong"] + counts["control"] + refused_by_ours:
        raise typer.Exit(EXIT_FOUND)


def _interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter, where a program takes milliseconds: then sequences are short."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _cases(matrix_size: Literal["quick", "full"], name_filter: str, *, mask_unowned_kv: bool, short: bool) -> "list[Case]":
    from atoll.probe.cases import with_flags
    from atoll.probe.matrix import matrix

    cases = [with_flags(case, mask_unowned_kv=mask_unowned_kv) for case in matrix(matrix_size, short=short)]
    chosen = [case for case in cases if name_filter in case.name]
    if not chosen:
        raise ConfigError(f"no case of --matrix {matrix_size} contains {name_filter!r}; names look like {cases[0].name!r}")
    return chosen


def _fills(given: str | None) -> tuple[str, ...]:
    from atoll.probe import FILLS

    if given is None:
        return FILLS
    chosen = tuple(fill.strip() for fill in given.split(","))
    for fill in chosen:
        if fill not in FILLS:
            raise ConfigError(f"fill {fill!r} is unknown; use some of {', '.join(FILLS)}")
    return chosen


class _Work:
    """One case for one process; picklable."""

    def __init__(self, name: str, case: "Case", device: "torch.device", fills: Sequence[str], tolerance: float) -> None:
        self.name, self.case, self.device, self.fills, self.tolerance = name, case, device, fills, tolerance

    def __call__(self) -> "CaseReport":
        from atoll.probe import get_adapter, probe_case

        return probe_case(get_adapter(self.name), self.case, device=self.device, fills=self.fills, tolerance=self.tolerance)


def _call(work: _Work) -> "CaseReport":
    return work()


def _run(work: list[_Work], num_jobs: int) -> "list[CaseReport]":
    """All reports in order, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(work))
        reports = []
        for report in _reports(work, num_jobs):
            reports.append(report)
            progress.update(task, advance=1, description=report.case)
    return reports


def _reports(work: list[_Work], num_jobs: int) -> "Iterator[CaseReport]":
    if num_jobs == 1:
        yield from map(_call, work)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # On a GPU nearly all of the time is compilation, one kernel per case. spawn: a forked process cannot use the parent's CUDA context.
    pool = ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(_call, work)
    finally:
        pool.shutdown(cancel_futures=True)


def _write_json(reports: "list[CaseReport]", counts: dict[str, int], name: str, device: "torch.device") -> None:
    from atoll.probe import summary_rows

    for row in summary_rows(reports):
        write_json(row)
    write_json({"summary": name, "device": str(device), "cases": len(reports), **counts})


def _print(reports: "list[CaseReport]", counts: dict[str, int], fills: Sequence[str], name: str, device: "torch.device") -> None:
    from rich.table import Table

    from atoll.probe import summary_rows

    console = stdout_console()
    if counts["leak"]:
        console.print(_leak_table(reports, fills, name))
    faults = [row for row in summary_rows(reports) if row["status"] != "leak"]
    if faults:
        table = Table("case", "status", "place", "detail", title="what else was found", title_justify="left")
        for row in faults[:SHOWN_FAULTS]:
            table.add_row(*(str(row.get(column, "")) for column in ("case", "status", "place", "detail")))
        console.print(table)
        if len(faults) > SHOWN_FAULTS:
            console.print(f"... and {len(faults) - SHOWN_FAULTS} more; --json shows all", highlight=False)
    worst = max((report.error.ratio for report in reports if report.error is not None), default=None)
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count or status == "clean")
    error = f"; worst error {worst:.2f} of the bound" if worst is not None else ""
    console.print(f"{name} on {device}: {len(reports)} cases: {told}{error}", highlight=False)


def _leak_table(reports: "list[CaseReport]", fills: Sequence[str], name: str) -> object:
    """Place by fill: in how many cases the output changed, and the rows of it that did in the worst one."""
    from rich.table import Table

    table = Table("place", *fills, title=f"what leaks through {name}: cases (rows of the worst case)", title_justify="left")
    leaks = [leak for report in reports for leak in report.leaks]
    for place in dict.fromkeys(leak.place for leak in leaks):
        cells = []
        for fill in fills:
            here = [leak for leak in leaks if leak.place == place and leak.fill == fill]
            worst = max(here, key=lambda leak: leak.rows / leak.total, default=None)
            cells.append(f"{len(here)} ({worst.rows}/{worst.total})" if worst is not None else "0")
        table.add_row(place, *cells)
    return table
