"""`atoll eval`: accuracy on questions with known answers, runs compared, and answers read back from the prefix cache."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from atoll.cli.base import EXIT_FOUND, engine_option, fail, json_object, stderr_console, write_json
from atoll.cli.flags import EngineFlags, spread
from atoll.config import EngineConfig, make_engine_config
from atoll.engine.sampling import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from atoll.eval.gsm8k import Gsm8kOptions, Gsm8kReport
    from atoll.eval.rows import Row
    from atoll.eval.target import Target

DEFAULT_FEWSHOT = 5

eval_app = typer.Typer(no_args_is_help=True, help="Measure accuracy.")

AsJson = Annotated[bool, typer.Option("--json", help="The report as one JSON object.")]


@dataclass(frozen=True)
class AskFlags:
    """What the commands share that ask questions, of an engine or of a server."""

    data: Annotated[
        Path | None,
        typer.Option(help="JSONL with 'question' and 'answer' in GSM8K's form.", dir_okay=False, show_default="the demo model's 1,319 problems"),
    ] = None
    shots: Annotated[
        Path | None,
        typer.Option(
            help="Where worked questions come from: the first lines, without the question asked.",
            dir_okay=False,
            show_default="train.jsonl beside the data, else the data",
        ),
    ] = None
    num_fewshot: Annotated[int | None, typer.Option(help="Worked questions before the one asked.", min=0, show_default="5; with --chat 0")] = None
    own_shots: Annotated[bool, typer.Option("--own-shots", help="Other worked questions before each question, so that prompts have little in common.")] = False
    chat: Annotated[bool, typer.Option("--chat", help="As a conversation, through the model's chat template.")] = False
    model: Annotated[
        str | None,
        typer.Option(help="'demo', 'smollm2', a Hugging Face folder, or a .gguf file; a server's name for it.", show_default="demo; the server's first"),
    ] = None
    base_url: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server instead.", show_default=False)] = None
    api_key: Annotated[str | None, typer.Option(help="For that server.", show_default=False)] = None
    extra_body: Annotated[
        str | None, typer.Option(help='JSON that goes into each request to a server, such as {"return_token_ids": true}.', show_default=False)
    ] = None
    limit: Annotated[int | None, typer.Option(help="Questions, from the first on.", min=1, show_default="all")] = None
    concurrency: Annotated[
        int | None, typer.Option(help="Questions that are answered at a time; of an engine in this process, --max-num-seqs.", min=1, show_default="64")
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per question, at most.", min=1)] = 256
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Probability kept, from the most likely token down.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of the first question; each next one, and each next pass, takes the next.", min=0, max=MAX_SEED // 2)] = 0
    option: Annotated[list[str] | None, typer.Option(help="Another engine option, as name=value; may be given again.", show_default=False)] = None
    out: Annotated[Path | None, typer.Option(help="Write the run to this new JSONL file, a row per question; makes its folder.", show_default=False)] = None
    commit: Annotated[str | None, typer.Option(help="Commit to note in the run.", show_default="the checkout's")] = None


@eval_app.command("gsm8k")
@spread
def eval_gsm8k(
    passes: Annotated[int, typer.Option(help="How often each question is asked.", min=1)] = 1,
    *,
    asked: AskFlags,
    flags: EngineFlags,
    as_json: AsJson = False,
) -> None:
    """Ask word problems and grade the answers as lm-eval's task gsm8k does: strict-match and flexible-extract, with standard errors."""
    options, header = _options(asked, passes)
    from atoll.eval.gsm8k import report_lines, run_gsm8k, sum_up

    with closing(_target(asked, flags)) as target, _writing(asked, header, target, "gsm8k", len(options.questions) * passes) as on_row:
        report = sum_up(run_gsm8k(target, options, on_row))
    if as_json:
        write_json(asdict(report))
    else:
        typer.echo("\n".join(report_lines(report)))
    _end(report)


@eval_app.command("replay")
@spread
def eval_replay(
    segment: Annotated[int, typer.Option(help="Questions that are filled and then read back together.", min=1)] = 64,
    ordering_control: Annotated[
        bool, typer.Option("--ordering-control", help="With --offload: read back once more with pages cleared after they were loaded, which must show.")
    ] = False,
    *,
    asked: AskFlags,
    flags: EngineFlags,
    as_json: AsJson = False,
) -> None:
    """Ask each segment of questions twice: the second pass reads its prompts from the prefix cache, and must give the first one's tokens.

    With --offload it says how much of that was fetched from a tier. Exits with 1 when an answer differs, or none does under --ordering-control; with 2 when
    the second pass read nothing from the cache.
    """
    if ordering_control and (asked.base_url is not None or flags.offload is None or flags.guard != "on"):
        fail("--ordering-control takes out the order of clears and loads of an engine in this process; give --offload and --guard on, and no --base-url")
    options, header = _options(asked, 1)
    from atoll.eval.gsm8k import report_lines, sum_up
    from atoll.eval.replay import Segment, control_lines, fetched_lines, run_replay, segment_line

    total = (3 if ordering_control else 2) * len(options.questions)
    on_segment: Callable[[Segment], None] = (lambda found: None) if as_json else (lambda found: typer.echo(segment_line(found)))
    with closing(_target(asked, flags)) as target, _writing(asked, header | {"segment": segment}, target, "replay", total) as on_row:
        report = run_replay(target, options, segment, on_row, on_segment, ordering_control=ordering_control)
    differing, scores = report.divergences, sum_up(report.rows)
    control = {"differing": len(report.control), "scores": asdict(sum_up(report.control_rows))} if ordering_control else None
    if as_json:
        tokens = {"prompt_tokens": report.prompt_tokens, "cached_tokens": report.cached_tokens, "fetched_tokens": report.fetched_tokens}
        summary = {"questions": len(options.questions), **tokens, "fetched_share": report.fetched_share, "control": control}
        write_json(summary | {"same": not differing, "segments": [asdict(one) for one in report.segments], "scores": asdict(scores)})
    else:
        typer.echo("\n".join(report_lines(scores)))
        for one in differing:
            typer.echo(f"question {one.index}: from {f'token {one.token}' if one.token is not None else f'character {one.character}'} on")
        if flags.offload is not None or report.fetched_tokens:
            typer.echo("\n".join(fetched_lines(report)))
        if ordering_control:
            typer.echo("\n".join(control_lines(report)))
        typer.echo("the same tokens" if not differing else f"{len(differing)} of {len(options.questions)} answers differ")
    _end(scores, found=bool(differing) or (ordering_control and not report.control))


@eval_app.command("compare")
def eval_compare(
    run_a: Annotated[Path, typer.Argument(help="A run that atoll eval wrote.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(help="Another run over the same questions.", show_default=False)],
    by: Annotated[
        Literal["auto", "output", "score"],
        typer.Option(help="Same by output: every answer; by score: no significant difference; auto: by output where both were greedy."),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare two runs question by question: only in A, only in B, McNemar's exact p, the difference with its interval, the first differing token.

    Exits with 1 when they are different.
    """
    from atoll.eval.compare import compare_runs, comparison_lines
    from atoll.eval.rows import read_run

    a, b = read_run(run_a), read_run(run_b)
    found = compare_runs(a, b, by)
    if as_json:
        write_json(asdict(found) | {"same": found.same})
    else:
        typer.echo("\n".join(comparison_lines(found, (str(run_a), str(run_b)))))
    if not found.same:
        raise typer.Exit(EXIT_FOUND)


def _options(asked: AskFlags, passes: int) -> "tuple[Gsm8kOptions, dict[str, Any]]":
    """What is asked, and what a run notes of it."""
    from atoll.eval.gsm8k import Gsm8kOptions
    from atoll.eval.prompts import STOP, make_form
    from atoll.eval.questions import DEMO_PROBLEMS, read_questions
    from atoll.eval.rows import file_sha256

    data = asked.data or DEMO_PROBLEMS
    beside = data.with_name("train.jsonl")
    shots = asked.shots or (beside if beside.is_file() else data)
    num_fewshot = asked.num_fewshot if asked.num_fewshot is not None else (0 if asked.chat else DEFAULT_FEWSHOT)
    params = SamplingParams(
        max_tokens=asked.max_tokens, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed, stop=() if asked.chat else STOP
    )
    form = make_form(read_questions(shots) if num_fewshot else [], num_fewshot, chat=asked.chat, own_shots=asked.own_shots)
    options = Gsm8kOptions(read_questions(data, asked.limit), form, params, passes)
    header = {
        "task": "gsm8k",
        "data": str(data),
        "data_sha256": file_sha256(data),
        "shots": str(shots) if num_fewshot else None,
        "shots_sha256": file_sha256(shots) if num_fewshot else None,
        "num_fewshot": num_fewshot,
        "own_shots": asked.own_shots,
        "chat": asked.chat,
        "limit": asked.limit,
        "passes": passes,
        "sampling": asdict(params),
    }
    return options, header


def _target(asked: AskFlags, flags: EngineFlags) -> "Target":
    if asked.base_url is not None:
        given = [name for name, value in flags.options.items() if value != getattr(EngineFlags, name)] + ["option"] * bool(asked.option)
        if given:
            fail(f"--{given[0].replace('_', '-')} is an option of an engine in this process; give it to the server instead, or leave out --base-url")
        from atoll.eval.endpoint import find_endpoint
        from atoll.eval.server_target import ServerTarget

        endpoint = find_endpoint(asked.base_url, model=asked.model, api_key=asked.api_key)
        return ServerTarget(endpoint, concurrency=asked.concurrency or EngineConfig.max_num_seqs, extra_body=json_object(asked.extra_body))
    if asked.extra_body is not None or asked.api_key is not None:
        fail("--extra-body and --api-key are for a server; give --base-url as well")
    options = flags.options | dict(engine_option(text) for text in asked.option or ())
    if asked.concurrency is not None:
        options["max_num_seqs"] = asked.concurrency
    make_engine_config(options)
    from atoll.eval.engine_target import EngineTarget

    with stderr_console().status(f"loading {asked.model or 'demo'}"):
        return EngineTarget(asked.model or "demo", **options)


@contextmanager
def _writing(asked: AskFlags, header: dict[str, Any], target: "Target", command: str, total: int) -> "Iterator[Callable[[Row], None]]":
    """Takes rows, one at a time: to the file, at once, and to a progress bar on a terminal."""
    import atoll
    from atoll.bench.rows import check_writable, git_commit
    from atoll.eval.rows import header_line, row_line

    if asked.out is not None:
        check_writable(asked.out)
        if asked.out.stat().st_size:
            fail(f"--out {asked.out} holds something already; name another file, or remove it")
    header = {"command": f"eval {command}", "atoll": atoll.__version__, "python": sys.version.split()[0], "commit": asked.commit or git_commit()} | header
    from rich.progress import Progress

    console = stderr_console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("answers", total=total)
        file = asked.out.open("w", encoding="utf-8") if asked.out is not None else None
        try:
            if file is not None:
                file.write(header_line(header | {"target": target.describe()}))

            def on_row(row: "Row") -> None:
                progress.advance(bar)
                if file is not None:
                    file.write(row_line(row))
                    file.flush()

            yield on_row
        finally:
            if file is not None:
                file.close()


def _end(report: "Gsm8kReport", *, found: bool = False) -> None:
    """Exits with 1 where answers ended in an error, after saying which, or where something was found."""
    from atoll.eval.gsm8k import error_lines

    if lines := error_lines(report):
        typer.echo("error: " + "\n".join(lines), err=True)
    if lines or found:
        raise typer.Exit(EXIT_FOUND)
