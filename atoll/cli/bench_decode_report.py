"""`atoll bench decode-report`: rows of `bench decode` as tables, judged by the targets, and as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.base import EXIT_FOUND


def bench_decode_report(
    files: Annotated[list[Path], typer.Argument(help="JSONL files that bench decode --out wrote.", show_default=False, dir_okay=False)],
    run: Annotated[str | None, typer.Option(help="Only rows of this run.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Only rows of this commit.", show_default=False)] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Lay rows of several GPUs, commits or versions side by side; of a case the last count.")] = False,
    published: Annotated[
        Path | None, typer.Option(help="Peers' figures from elsewhere, as bench/published-h200.json; told apart.", dir_okay=False, show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw each shape's time over its floor into this SVG file.", dir_okay=False, show_default=False)] = None,
    check: Annotated[bool, typer.Option("--check", help="End with 1 where a target is missed or not measured.")] = False,
) -> None:
    """Read rows of bench decode: tables by model, format and page, the mask's cost, peers, and the targets, in Markdown."""
    from atoll.bench.decode_report import report_lines
    from atoll.bench.published import read_published
    from atoll.bench.results import read_results
    from atoll.bench.targets import judge

    results = read_results(files, run=run, commit=commit, mixed=mixed)
    figures = read_published(published) if published is not None else None
    verdicts = judge(results, figures)
    typer.echo("\n".join(report_lines(results, verdicts, figures)))
    if plot is not None:
        from atoll.bench.plot import plot_over_floor

        plot_over_floor(results, plot)
    if check and not all(verdict.met for verdict in verdicts):
        raise typer.Exit(EXIT_FOUND)
