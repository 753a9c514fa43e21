"""`atoll bench`: measured speed of decode attention, of a model's decode steps, of checkpoints and the guard, and of the whole engine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from atoll.cli.base import EXIT_FOUND, EXIT_INTERRUPT, fail, stderr_console, torch_device, write_json
from atoll.config import make_engine_config
from atoll.engine.sampling import MAX_SEED
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.bench.decode import DecodeBenchOptions, DecodeReport
    from atoll.bench.rows import DecodeRow
    from atoll.bench.tune import Tuned

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed.")


@bench_app.command("decode")
def bench_decode(
    shapes: Annotated[Literal["quick", "full"], typer.Option(help="28 shapes that tell most, or all 513.")] = "quick",
    name_filter: Annotated[str, typer.Option("--filter", help="Only cases whose name contains this, as in 35b-tp1/bf16/p16/q1/16x1024.")] = "",
    limit: Annotated[int | None, typer.Option(help="At most so many cases.", min=1, show_default=False)] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="auto, gluon_sm90, triton, reference, or a peer such as flashinfer_xqa; again: timed beside the first.", show_default="auto"),
    ] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="Another kernel to time beside: a shipped name or module:function.", show_default=False)] = None,
    l2: Annotated[Literal["warm", "cold", "both"], typer.Option(help="State of the L2 cache before a call.")] = "warm",
    page_order: Annotated[Literal["shuffled", "in_order"], typer.Option(help="Pages as in a pool in long use, or as in a fresh one.")] = "shuffled",
    unmasked: Annotated[bool, typer.Option(help="Time mask_unowned_kv=False beside.")] = True,
    noise: Annotated[bool, typer.Option(help="Time the masked kernel twice.")] = True,
    rounds: Annotated[int, typer.Option(help="Samples per variant; the median counts.", min=1)] = 7,
    jobs: Annotated[int | None, typer.Option(help="Processes that compile kernels.", min=1, show_default="one per core, 16 at most")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Begin no case after so many seconds.", min=0, show_default=False)] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run; the cases that --out has of it are left out, so the same command goes on.", show_default=False)
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Sweep the kernel's tuning instead.")] = False,
    seed: Annotated[int, typer.Option(help="Of lengths, pages and values.", min=0, max=MAX_SEED)] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1; cpu only tries the command out.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout instead of a table.")] = False,
) -> None:
    """Time decode attention: masked against unmasked against others, each case checked first. Rows go to --out case by case."""
    target = torch_device(device)
    if target.type != "cuda" and device == "auto":
        fail("bench decode needs a GPU, and torch finds none; pass --device cpu to try the command with the reference backend")
    from dataclasses import asdict

    from atoll.bench.decode import DecodeBenchOptions, run_decode
    from atoll.bench.rows import DecodeRow, check_writable, environment, measured_cases
    from atoll.ops.attention import BACKENDS
    from atoll.probe.adapters import get_adapter

    if run is not None and out is None:
        fail(f"--run {run} has no file to go on from; give --out too")
    if out is not None:
        check_writable(out)
    env = environment(target, commit)
    ours = [name for name in backend or () if name == "auto" or name in BACKENDS] or ["auto"]
    others = [name for name in backend or () if name not in ours]
    options = DecodeBenchOptions(
        shapes=shapes,
        name_filter=name_filter,
        limit=limit,
        backend=ours[0],
        beside=tuple(ours[1:]),
        adapters={name: get_adapter(name) for name in [*others, *(adapter or ())]},
        l2=("warm", "cold") if l2 == "both" else (l2,),
        page_order=page_order,
        unmasked=unmasked,
        noise=noise,
        rounds=rounds,
        jobs=jobs,
        budget_s=budget_s,
        seed=seed,
        device=target,
        run=run,
        measured=measured_cases(out, run, env) if out is not None and run is not None else frozenset(),
    )

    def keep(rows: list[DecodeRow]) -> None:
        # At once: a later case may end the process.
        emit_rows([asdict(row) | asdict(env) for row in rows], out, as_json=as_json)

    if tune:
        _tune(options, keep, as_json=as_json)
        return
    from atoll.bench.report import case_lines

    def on_case(rows: list[DecodeRow]) -> None:
        keep(rows)
        if not as_json:
            typer.echo("\n".join(case_lines(rows, None)))

    _finish(run_decode(options, on_case), as_json=as_json)


def _finish(report: "DecodeReport", *, as_json: bool) -> None:
    from atoll.bench.report import summary_lines

    for line in summary_lines(report.rows, report.read_gbps, report.roof_gbps):
        typer.echo(line, err=as_json)
    if report.num_left_out:
        typer.echo(f"{report.num_left_out} cases were left out (time budget, or interrupted); with --run the same command goes on with them", err=True)
    for failure in report.gate_failures:
        typer.echo(f"gate failed: {failure}", err=True)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPT)
    if report.lost is not None:
        fail(f"{report.lost}; leave it out, or go on behind that case with --run")
    if report.gate_failures:
        raise typer.Exit(EXIT_FOUND)


def _tune(options: "DecodeBenchOptions", keep: "Callable[[list[DecodeRow]], None]", *, as_json: bool) -> None:
    from atoll.bench.tune import run_tune

    num_tuned = 0

    def on_case(tuned: "Tuned") -> None:
        nonlocal num_tuned
        num_tuned += 1
        keep(list(tuned.rows(options.seed, options.run)))
        if not as_json:
            typer.echo(tuned.line())

    all_tuned = run_tune(options, on_case)
    if num_tuned < len(all_tuned):
        typer.echo(f"{len(all_tuned) - num_tuned} cases were left out (time budget)", err=True)


def emit_rows(found: list[dict[str, Any]], out: Path | None, *, as_json: bool) -> None:
    """Rows to the file that keeps them, and to stdout where a machine reads."""
    from atoll.bench.rows import append_jsonl

    if out is not None:
        append_jsonl(out, found)
    if as_json:
        for row in found:
            write_json(row)


@bench_app.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="'demo', 'smollm2', a Hugging Face folder, or a .gguf file.")] = "demo",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated; the first is compared with transformers if it is 1.")] = "1,16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per sequence.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Measured rounds; the median counts.", min=1)] = 5,
    peer: Annotated[bool, typer.Option("--transformers/--no-transformers", help="Time transformers' generate beside, batch 1.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16; the same on both sides.")] = "auto",
    kv_format: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8_tensor, fp8_token.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout.")] = False,
) -> None:
    """Time the whole engine's decode: tokens per second by batch size, interleaved with transformers on the same weights."""
    sizes = split_numbers("--batches", batches)
    make_engine_config({"device": device, "dtype": dtype, "kv_format": kv_format})
    from dataclasses import asdict

    from rich.progress import Progress

    from atoll.bench.engine import EngineBenchOptions, report_lines, run_engine
    from atoll.bench.rows import check_writable, environment
    from atoll.engine.build import choose_dtype

    target = torch_device(device)
    if out is not None:
        check_writable(out)
    options = EngineBenchOptions(model, sizes, prompt_tokens, new_tokens, rounds, peer and sizes[0] == 1, target, choose_dtype(dtype), kv_format)
    console = stderr_console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=rounds + 1)
        rows = run_engine(options, on_round=lambda done: progress.update(task, completed=done + 1))
    env = environment(target, commit)
    found = [asdict(row) | {"median_tokens_per_s": row.median, "spread": row.spread} | asdict(env) for row in rows]
    emit_rows(found, out, as_json=as_json)
    for line in report_lines(rows):
        typer.echo(line, err=as_json)


@bench_app.command("model")
def bench_model(
    shape: Annotated[str, typer.Option(help="qwen3.5-35b-a3b, or tiny to try the command out.")] = "qwen3.5-35b-a3b",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,16,64,256",
    context: Annotated[str, typer.Option(help="Tokens of each sequence, comma-separated; cases that do not fit in memory are left out.")] = "1024",
    kv_format: Annotated[str, typer.Option(help="Comma-separated: bf16, fp16, fp32, fp8_tensor, fp8_token.")] = "bf16",
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    replays: Annotated[int, typer.Option(help="Measured steps; the median counts.", min=1)] = 30,
    profile: Annotated[bool, typer.Option("--profile", help="Also say which kernels a step's time goes to.")] = False,
    attention_backend: Annotated[
        list[str] | None,
        typer.Option("--attention-backend", "--backend", help="auto, gluon_sm90, triton, reference; again: takes turns with the first.", show_default="auto"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, tokens, keys, values and states.", min=0, max=MAX_SEED)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout instead of a table.")] = False,
) -> None:
    """Time a model's decode steps with random weights, sequences already computed up to the context, one or several attention backends in turn."""
    batches, contexts = split_numbers("--batch", batch), split_numbers("--context", context)
    kv_formats = tuple("bf16" if name == "auto" else name for name in split_names(kv_format))
    for name in kv_formats:
        make_engine_config({"device": device, "dtype": dtype, "kv_format": name, "page_size": page_size})
    target = torch_device(device)
    if target.type != "cuda" and shape != "tiny":
        fail(f"bench model needs a GPU for the shape {shape!r}, this is {target}; pass --shape tiny to try the command out")
    from dataclasses import asdict

    from atoll.bench.model import ModelBenchOptions, ModelRow, row_lines, run_model
    from atoll.bench.rows import check_writable, environment
    from atoll.engine.build import choose_dtype

    if out is not None:
        check_writable(out)
    env = environment(target, commit)
    backends = tuple(attention_backend or ["auto"])
    options = ModelBenchOptions(shape, batches, contexts, kv_formats, page_size, replays, profile, target, choose_dtype(dtype), backends, seed)

    def keep(row: ModelRow) -> None:
        # At once: a later case may run out of memory.
        found = asdict(row) | {"tokens_per_s": row.tokens_per_s} | asdict(env)
        emit_rows([found], out, as_json=as_json)
        if not as_json:
            typer.echo("\n".join(row_lines(row)))

    run_model(options, on_row=keep)


@bench_app.command("checkpoint")
def bench_checkpoint(
    shape: Annotated[
        str | None,
        typer.Option(help="Comma-separated: qwen3.5-35b-a3b, tiny, or a hybrid model whose config is read.", show_default="qwen3.5-35b-a3b,demo; cpu: tiny"),
    ] = None,
    kv_format: Annotated[str, typer.Option(help="Comma-separated: bf16, fp16, fp32, fp8_tensor, fp8_token.")] = "bf16,fp8_tensor,fp8_token",
    page_size: Annotated[str, typer.Option(help="Tokens of a page, comma-separated.")] = "16,64",
    states: Annotated[str, typer.Option(help="States that one call saves or restores, comma-separated.")] = "1,4,16,64",
    tokens: Annotated[str, typer.Option(help="Tokens of a released sequence, whose pages one call clears, comma-separated.")] = "1024,16384",
    rounds: Annotated[int, typer.Option(help="Samples of 4 calls; the median counts.", min=1)] = 5,
    step_us: Annotated[
        float | None, typer.Option(help="A decode step as bench model times it, to say what share of it a clear is.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of states and pages.", min=0, max=MAX_SEED - 1)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout instead of a table.")] = False,
) -> None:
    """Time a checkpoint's copies between slots and pages, and the guard's clears; pools alone, no weights."""
    page_sizes, num_states, num_tokens = split_numbers("--page-size", page_size), split_numbers("--states", states), split_numbers("--tokens", tokens)
    target = torch_device(device)
    shapes = split_names(shape or ("qwen3.5-35b-a3b,demo" if target.type == "cuda" else "tiny"))
    if target.type != "cuda" and "qwen3.5-35b-a3b" in shapes:
        fail(f"bench checkpoint needs a GPU for the shape 'qwen3.5-35b-a3b', this is {target}; pass --shape tiny to try the command out")
    from dataclasses import asdict

    from atoll.bench.checkpoint import CheckpointBenchOptions, CheckpointRow, case_lines, run_checkpoint
    from atoll.bench.rows import check_writable, environment

    if out is not None:
        check_writable(out)
    env = environment(target, commit)
    options = CheckpointBenchOptions(shapes, split_names(kv_format), page_sizes, num_states, num_tokens, rounds, step_us, target, seed)
    derived = ("image_tokens", "gbps", "read_share", "us_per_page", "step_share")

    def keep(rows: list[CheckpointRow]) -> None:
        found = [asdict(row) | {name: getattr(row, name) for name in derived} | asdict(env) for row in rows]
        emit_rows(found, out, as_json=as_json)
        if not as_json:
            typer.echo("\n".join(case_lines(rows)))

    report = run_checkpoint(options, on_case=keep)
    for failure in report.gate_failures:
        typer.echo(f"gate failed: {failure}", err=True)
    if report.gate_failures:
        raise typer.Exit(EXIT_FOUND)


def split_names(given: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in given.split(","))


@bench_app.command("reuse")
def bench_reuse(
    model: Annotated[str | None, typer.Option(help="Also time the first token, warm and cold, with this model.", show_default="no model, no times")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens per page, a power of two.")] = 16,
    image_pages: Annotated[int | None, typer.Option(help="Pages of one state; 0: none.", min=0, show_default="the model's, else a 35B hybrid's")] = None,
    num_pages: Annotated[int, typer.Option(help="Pages of the pool; few make it evict.", min=2)] = 50_000,
    shifts: Annotated[str, typer.Option(help="Tokens by which prompts are longer, comma-separated.")] = "0,1,7,16,33,50,64,77,100",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the timed prompt, at most.", min=2)] = 2000,
    rounds: Annotated[int, typer.Option(help="Timed rounds; the median counts.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout.")] = False,
) -> None:
    """Count what is reused of prompts in a chat, with a shared prefix and of a repeated prompt, by checkpoint policy, against the ideal."""
    lengths = split_numbers("--shifts", shifts, least=0)
    make_engine_config({"device": device, "page_size": page_size})
    from dataclasses import asdict

    from atoll.bench.reuse import IMAGE_PAGES, ReuseOptions, report_lines, run_reuse
    from atoll.bench.rows import check_writable, environment
    from atoll.engine.build import choose_checkpoint_interval

    target = torch_device(device)
    if out is not None:
        check_writable(out)
    found: list[dict[str, Any]] = []
    if model is not None:
        timed, own_image_pages = _time_first_token(model, page_size, prompt_tokens, rounds, device)
        image_pages = own_image_pages if image_pages is None else image_pages
        found.append(timed)
    image_pages = IMAGE_PAGES if image_pages is None else image_pages
    interval = choose_checkpoint_interval(make_engine_config({"page_size": page_size}), image_pages)
    rows = list(run_reuse(ReuseOptions(page_size, image_pages, num_pages, interval), shifts=lengths))
    env = environment(target, commit)
    found = [one | asdict(env) for one in [*found, *(asdict(row) | {"of_ideal": row.of_ideal} for row in rows)]]
    emit_rows(found, out, as_json=as_json)
    for line in report_lines(rows):
        typer.echo(line, err=as_json)


def _time_first_token(model: str, page_size: int, prompt_tokens: int, rounds: int, device: str) -> tuple[dict[str, object], int]:
    """The timed row, and the pages of one of the model's states."""
    from dataclasses import asdict

    from atoll import LLM
    from atoll.bench.engine import PROMPT
    from atoll.bench.reuse import time_first_token

    llm = LLM(model, device=device, page_size=page_size, max_num_seqs=1)
    once = llm.engine.tokenizer.encode(PROMPT)
    count = min(prompt_tokens, llm.engine.scheduler.config.max_model_len - 1)
    row = time_first_token(llm, model, (once * -(-count // len(once)))[:count], rounds)
    cold, warm = (sorted(times)[len(times) // 2] for times in (row.cold_s, row.warm_s))
    typer.echo(
        f"first token of {row.prompt_tokens} with {model}: cold {cold * 1e3:.1f} ms, warm {warm * 1e3:.1f} ms ({row.speedup:.1f} times), "
        f"{row.reused_tokens} reused",
        err=True,
    )
    return asdict(row) | {"speedup": row.speedup}, llm.engine.scheduler.config.image_pages


def split_numbers(option: str, given: str, *, least: int = 1) -> tuple[int, ...]:
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) >= least for part in parts):
        kind = "positive numbers" if least else "numbers that are not negative"
        raise ConfigError(f"{option} {given!r} is not a list of {kind}; write for example {least},16")
    return tuple(int(part) for part in parts)
