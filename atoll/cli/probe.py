"""`atoll probe`: the ownership promise, tried on decode kernels and on a whole engine."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.cli.base import EXIT_ERROR, EXIT_FOUND, engine_option, fail, stderr_console, stdout_console, torch_device, write_json
from atoll.cli.flags import EngineFlags, NumberFlags, spread
from atoll.config import make_engine_config
from atoll.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from atoll.probe import CaseReport
    from atoll.probe.cases import Case
    from atoll.probe.fault import FaultRow

SHOWN_FAULTS = 20

probe_app = typer.Typer(no_args_is_help=True, help="Try the promise that output depends on owned rows only.")


@probe_app.command("kernels")
def probe_kernels(
    backend: Annotated[str | None, typer.Option(help="One of ours: gluon_sm90, triton, reference.", show_default=False)] = None,
    adapter: Annotated[str | None, typer.Option(help="Anybody's: a shipped adapter's name, or module:function.", show_default=False)] = None,
    matrix: Annotated[Literal["quick", "full"], typer.Option(help="Cases that meet each feature once, or all.")] = "quick",
    mask_unowned_kv: Annotated[bool, typer.Option(help="False asks for the old contract, which must leak.")] = True,
    fills: Annotated[str | None, typer.Option(help="Comma-separated, of 0x7f, 0xff, nan, inf, max, random, stale.", show_default="all")] = None,
    name_filter: Annotated[str, typer.Option("--filter", help="Only cases whose name contains this.")] = "",
    min_seq_len: Annotated[int, typer.Option(help="Leave out shorter sequences, for kernels that refuse them.", min=0)] = 0,
    tolerance: Annotated[float, typer.Option(help="Times the error bound, for kernels that compute in fp8.", min=0)] = 1.0,
    jobs: Annotated[int | None, typer.Option(help="Processes.", min=1, show_default="on a GPU one per core, 16 at most; else 1")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines: one per leak, wrong answer or refusal, then a summary.")] = False,
) -> None:
    """Fill every place that no sequence owns with hostile bytes; not one bit of the output may change.

    Exits with 0 when all cases are clean, 1 when one leaks, answers wrongly, fails or swallows a NaN that a sequence owns, 2 when nothing could be run.
    With TRITON_INTERPRET=1 in the environment, Triton kernels run on a CPU, and so does gluon_sm90.
    """
    if (backend is None) == (adapter is None):
        fail("give one of --backend (gluon_sm90, triton, reference) and --adapter (leaky_control, flashinfer_xqa, ..., or module:function)")
    name = backend or adapter or ""
    target = torch_device(device)
    cases = _cases(matrix, name_filter, mask_unowned_kv=mask_unowned_kv, short=_interpreted(), min_seq_len=min_seq_len)
    chosen_fills = _fills(fills)
    from atoll.ops.attention import load_backend
    from atoll.probe.parallel import MAX_PROCESSES, probe_by_name

    num_jobs = min(len(cases), jobs or (min(MAX_PROCESSES, os.cpu_count() or 1) if target.type == "cuda" else 1))
    probe = functools.partial(probe_by_name, name, device=str(target), fills=chosen_fills, tolerance=tolerance)
    reports = _run(probe, cases, num_jobs)
    counts = {
        status: sum(report.status == status for report in reports) for status in ("clean", "leak", "failed", "out of range", "wrong", "control", "refused")
    }
    if as_json:
        _write_json(reports, counts, name, target)
    else:
        _print(reports, counts, chosen_fills, name, target)
    if counts["refused"] == len(reports):
        raise typer.Exit(EXIT_ERROR)
    # Others may take what they like; ours must take every case of the matrix, but for one made for some specs alone.
    refused_by_ours = counts["refused"] if backend is not None and getattr(load_backend(backend), "COVERS_ALL", True) else 0
    found = len(reports) - counts["clean"] - counts["refused"]
    if found + refused_by_ours:
        raise typer.Exit(EXIT_FOUND)


def _interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter, where a program takes milliseconds: then sequences are short."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _cases(matrix_size: Literal["quick", "full"], name_filter: str, *, mask_unowned_kv: bool, short: bool, min_seq_len: int) -> "list[Case]":
    from atoll.probe.cases import with_flags
    from atoll.probe.matrix import matrix

    cases = [with_flags(case, mask_unowned_kv=mask_unowned_kv) for case in matrix(matrix_size, short=short)]
    chosen = [case for case in cases if name_filter in case.name]
    if not chosen:
        raise ConfigError(f"no case of --matrix {matrix_size} contains {name_filter!r}; names look like {cases[0].name!r}")
    longer = [replace(case, seq_lens=tuple(length for length in case.seq_lens if length >= min_seq_len)) for case in chosen]
    if not all(case.seq_lens for case in longer):
        raise ConfigError(f"--min-seq-len {min_seq_len} leaves some case without a sequence; the longest are {max(chosen[0].seq_lens)} tokens, use less")
    return longer


def _fills(given: str | None) -> tuple[str, ...]:
    from atoll.probe import FILLS

    if given is None:
        return FILLS
    chosen = tuple(fill.strip() for fill in given.split(","))
    for fill in chosen:
        if fill not in FILLS:
            raise ConfigError(f"fill {fill!r} is unknown; use some of {', '.join(FILLS)}")
    return chosen


def _run(probe: "Callable[[Case], CaseReport]", cases: "list[Case]", num_jobs: int) -> "list[CaseReport]":
    """All reports in order, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    reports = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        for report in _reports(probe, cases, num_jobs):
            reports.append(report)
            progress.update(task, advance=1, description=report.case)
    return reports


def _reports(probe: "Callable[[Case], CaseReport]", cases: "list[Case]", num_jobs: int) -> "Iterator[CaseReport]":
    if num_jobs == 1:
        yield from map(probe, cases)
        return
    from atoll.probe.parallel import process_pool

    pool = process_pool(num_jobs)
    try:
        # Processes that start now inherit that Ctrl-C is ignored: they would print tracebacks, and this one ends them.
        heed = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            reports = pool.map(probe, cases)
        finally:
            signal.signal(signal.SIGINT, heed)
        yield from reports
    except (KeyboardInterrupt, GeneratorExit):
        # An interrupt waits for no case, begun or not.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
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
        console.print(f"what leaks through {name}, by place and fill: cases (rows of out or lse in the worst one)", highlight=False)
        console.print(_leak_table(reports, fills))
    faults = [row for row in summary_rows(reports) if row["status"] != "leak"]
    if faults:
        table = Table("case", "status", "place", "detail")
        for row in faults[:SHOWN_FAULTS]:
            table.add_row(*(str(row.get(column, "")) for column in ("case", "status", "place", "detail")))
        console.print("what else was found", highlight=False)
        console.print(table)
        if len(faults) > SHOWN_FAULTS:
            console.print(f"... and {len(faults) - SHOWN_FAULTS} more; --json shows all", highlight=False)
    worst = max((report.error.ratio for report in reports if report.error is not None), default=None)
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count or status == "clean")
    error = f"; worst error {worst:.2f} of the bound" if worst is not None else ""
    console.print(f"{name} on {device}: {len(reports)} cases: {told}{error}", highlight=False)


def _leak_table(reports: "list[CaseReport]", fills: Sequence[str]) -> object:
    """Place by fill: in how many cases the output changed, and the rows of it that did in the worst one."""
    from rich.table import Table

    table = Table("place", *fills)
    found = [(report.case, leak) for report in reports for leak in report.leaks]
    for place in dict.fromkeys(leak.place for _, leak in found):
        cells = []
        for fill in fills:
            here = [(case, leak) for case, leak in found if leak.place == place and leak.fill == fill]
            worst = max((leak for _, leak in here), key=lambda leak: leak.rows / leak.total, default=None)
            cells.append(f"{len({case for case, _ in here})} ({worst.rows}/{worst.total})" if worst is not None else "0")
        table.add_row(place, *cells)
    return table


@probe_app.command("engine")
@spread
def probe_engine(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default="eight short ones")] = None,
    model: Annotated[str, typer.Option(help="'demo', 'smollm2', a Hugging Face folder, or a .gguf file.")] = "demo",
    fill: Annotated[str, typer.Option(help="The poisoned pool's bytes: nan, 0x7f, inf, max, random.")] = "nan",
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt, at most.", min=1)] = 32,
    *,
    flags: EngineFlags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Generate greedily from a zero-filled pool and from a poisoned one: same tokens, or the first difference and exit code 1."""
    options = flags.options
    make_engine_config(options | {"kv_fill": fill})
    from dataclasses import asdict

    from atoll.probe.engine import PROMPTS
    from atoll.probe.engine import probe_engine as run_probe

    texts = prompts or list(PROMPTS)
    with stderr_console().status(f"generating twice with {model}"):
        report = run_probe(model, texts, fill=fill, max_tokens=max_tokens, **options)
    if as_json:
        write_json(asdict(report) | {"same": report.same})
    else:
        for found in report.divergences:
            typer.echo(
                f"prompt {found.prompt} {texts[found.prompt]!r} differs from token {found.token} on: {found.clean} with zeros, {found.poisoned} with {fill}"
            )
            typer.echo(f"  zero  {found.clean_text!r}\n  {fill:<5} {found.poisoned_text!r}")
        outcome = "the same tokens" if report.same else f"{len(report.divergences)} prompts differ"
        typer.echo(
            f"{model}: {report.prompts} prompts, {report.tokens} tokens, pool filled with zero and with {fill}: {outcome}; "
            f"largest difference of a logprob {report.max_logprob_difference:.3g}"
        )
    if not report.same:
        raise typer.Exit(EXIT_FOUND)


@probe_app.command("fault")
@spread
def probe_fault(
    questions: Annotated[Path, typer.Option(help="JSONL with 'question' and 'answer' in GSM8K's form, the answer's number after '####'.", dir_okay=False)],
    model: Annotated[str, typer.Option(help="A hybrid model: a name such as 'demo', or a Hugging Face folder.")] = "demo",
    count: Annotated[int | None, typer.Option(help="Questions, from the first on.", min=1, show_default="all")] = None,
    leaky_backend: Annotated[str, typer.Option(help="Attention that does not mask: leaky, flashinfer_xqa, flashinfer_tensor_cores.")] = "leaky",
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per question, at most.", min=1)] = 256,
    chat: Annotated[bool, typer.Option(help="Put each question through the model's chat template, as a user's message.")] = True,
    images: Annotated[
        Literal["everywhere", "checkpoints"], typer.Option(help="Every free page has held a state's image, or those that the engine's own checkpoints took.")
    ] = "everywhere",
    option: Annotated[list[str] | None, typer.Option(help="Another engine option, as name=value; may be given again.", show_default=False)] = None,
    *,
    flags: NumberFlags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row, each as soon as it is done.")] = False,
) -> None:
    """Answer questions four times: with attention that masks, from a pool of zeros and of NaN; with attention that does not, without the guard and with it.

    Before the questions, pages have held images of states and come back. Exits with 1 when masked attention gives other tokens from NaN.
    """
    options = flags.options | dict(engine_option(text) for text in option or ())
    make_engine_config(options)
    from dataclasses import asdict

    from atoll.eval.questions import read_questions
    from atoll.probe import fault

    asked = read_questions(questions, count)
    rows = []
    with stderr_console().status(f"answering {len(asked)} questions four times with {model}"):
        for row in fault.probe_fault(model, asked, leaky_backend=leaky_backend, max_tokens=max_tokens, chat=chat, images=images, **options):
            rows.append(row)
            if as_json:
                write_json(asdict(row) | {"model": model, "kv_format": flags.kv_format, "images": images, "accuracy": row.accuracy})
    if not as_json:
        _print_fault(rows, model)
    if rows[1].same_tokens != len(asked):
        raise typer.Exit(EXIT_FOUND)


def _print_fault(rows: "list[FaultRow]", model: str) -> None:
    from rich.table import Table

    title = f"{model}, {rows[0].questions} questions, {rows[0].image_pages} free pages that were made to hold images before"
    table = Table("attention", "backend", "guard", "exact", "accuracy", "empty", "errors", "same tokens as the first", title=title, title_justify="left")
    for row in rows:
        cells = (row.exact, f"{row.accuracy:.4f}", row.empty, row.errors, row.same_tokens)
        table.add_row(row.name, row.attention_backend, "on" if row.guard else "off", *map(str, cells))
    stdout_console().print(table)
