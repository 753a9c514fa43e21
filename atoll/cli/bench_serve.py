"""`atoll bench serve` and `atoll bench ab`: load on a server, and two commands in alternating restarts."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.base import EXIT_FOUND, engine_option, fail, json_object, stderr_console, torch_device, write_json
from atoll.config import make_engine_config
from atoll.engine.sampling import MAX_SEED
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.bench.serve import ServeOptions, ServeRun
    from atoll.bench.serve_data import DataOptions
    from atoll.bench.serve_offline import OfflineOptions

DEFAULT_URL = "http://127.0.0.1:8000"


def bench_serve(
    base_url: Annotated[str, typer.Option(help="An OpenAI-compatible server.")] = DEFAULT_URL,
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")] = "/v1/completions",
    offline: Annotated[bool, typer.Option("--offline", help="No server: the same requests to an engine in this process.")] = False,
    launch: Annotated[bool, typer.Option("--launch", help="Start a server, and in turn the engine without one; print both and their ratio.")] = False,
    rounds: Annotated[int, typer.Option(help="With --launch: of each side; medians count.", min=1)] = 3,
    option: Annotated[
        list[str] | None, typer.Option(help="With --offline or --launch: an engine's option, as in num_pages=400; may be given again.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The server's name for it; with --offline or --launch as for atoll serve.", show_default="its first; demo")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="For the server.", show_default=False)] = None,
    dataset_name: Annotated[str, typer.Option(help="random, shared-prefix, multi-turn, file.")] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="JSONL with 'prompt', 'question' or 'messages', and maybe 'output_len'.", dir_okay=False, show_default=False)
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests; of conversations, their turns.")] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt, beside a shared prefix; of a turn.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens generated at most.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Both are uniform within 1 - ratio and 1 + ratio of these.")] = 0.0,
    shared_prefix_len: Annotated[int, typer.Option(help="Tokens that shared-prefix prompts have in common.")] = 512,
    num_prefixes: Annotated[int, typer.Option(help="Prefixes that are shared, in turn.")] = 1,
    num_turns: Annotated[int, typer.Option(help="Of a conversation.")] = 4,
    request_rate: Annotated[float, typer.Option(help="Requests a second (of conversations, their first turns); inf: all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma distribution of gaps; 1: Poisson, less: bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at a time.", show_default="no limit")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and gaps.", min=0, max=MAX_SEED)] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")] = False,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    extra_body: Annotated[str | None, typer.Option(help="JSON that goes into each request.", show_default=False)] = None,
    num_warmups: Annotated[
        int | None, typer.Option(help="Requests before the clock starts.", min=0, show_default="0; with --offline or --launch as --max-concurrency")
    ] = None,
    leave_share: Annotated[float, typer.Option(help="Share of the clients that go away somewhere in their answer.")] = 0.0,
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft,tpot,itl,e2el.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Comma-separated.")] = "99",
    goodput: Annotated[list[str] | None, typer.Option(help="Limits in ms, as in 'ttft:200 tpot:50'; may be given again.", show_default=False)] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures to a JSON file.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="And each request's own.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of that file.", file_okay=False)] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="Its name.", show_default="from rate, concurrency, model and date")] = None,
    label: Annotated[str | None, typer.Option(help="Noted in the result.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as a JSON line for each run; with --launch, then one of both.")] = False,
) -> None:
    """Load a server and measure what its clients see. Flags and JSON keys are those of `vllm bench serve`.

    Exits with 1 when a request failed.
    """
    starts = offline or launch
    if offline and launch:
        fail("--offline and --launch are both given; give one of them")
    if option and not starts:
        fail("--option is for an engine that this command starts; give it to the server instead, or add --launch or --offline")
    from atoll.bench.serve_data import DataOptions
    from atoll.bench.serve_report import details, errors_of, figures, parse_goodput, parse_names, parse_percentiles, report_lines

    wanted: dict[str, Any] = {
        "metrics": parse_names("--percentile-metrics", percentile_metrics),
        "percentiles": parse_percentiles(metric_percentiles),
        "goodput": parse_goodput(goodput or []),
    }
    data = DataOptions(num_prompts, random_input_len, random_output_len, random_range_ratio, shared_prefix_len, num_prefixes, num_turns, seed, dataset_path)
    load: dict[str, Any] = {
        "path": endpoint,
        "request_rate": request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "extra_body": json_object(extra_body),
        "num_warmups": num_warmups if num_warmups is not None else (max_concurrency or 0) * starts,
        "leave_share": leave_share,
    }
    if out is not None:
        # Only then: it brings in torch, which a client can do without.
        from atoll.bench.rows import append_jsonl, check_writable, environment

        check_writable(out)
    told: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint": endpoint,
        "label": label,
        "dataset_name": dataset_name,
        "num_prompts": num_prompts,
        "random_input_len": random_input_len,
        "random_output_len": random_output_len,
        "request_rate": request_rate if request_rate != float("inf") else "inf",
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "leave_share": leave_share,
        "seed": seed,
    }
    device, errors, num_requests = "auto", list[str](), 0

    def take(run: "ServeRun", **more: Any) -> None:
        nonlocal num_requests
        found = told | more | figures(run, **wanted)
        if out is not None:
            append_jsonl(out, [found | asdict(environment(torch_device(device), commit))])
        if save_result or save_detailed:
            path = result_dir / (result_filename or _result_name(found))
            _save(path, found | (details(run) if save_detailed else {}))
            typer.echo(f"saved {path}", err=True)
        if as_json:
            write_json(found)
        else:
            typer.echo("\n".join(report_lines(found)))
        errors.extend(errors_of(run))
        num_requests += len(run.outcomes)

    if starts:
        from atoll.bench.serve_offline import OfflineOptions, offline_load

        options = OfflineOptions(model or "demo", dict(map(engine_option, option or ())), offline_load(**load), dataset_name, data)
        device = make_engine_config(options.engine_options).device
        told |= {"model_id": options.model, "engine_options": options.engine}
        if launch:
            _run_both(options, rounds, take, as_json=as_json)
        else:
            take(_run_offline(options), backend="offline", base_url=None)
    else:
        _run_online(base_url, model, api_key, load, dataset_name, data, take)
    if errors:
        typer.echo(f"error: {len(errors)} of {num_requests} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(EXIT_FOUND)


def _backend(load: "ServeOptions") -> str:
    """vLLM's word for it."""
    return "openai-chat" if load.chat else "openai"


def _run_online(
    base_url: str, model: str | None, api_key: str | None, load: dict[str, Any], dataset: str, data: "DataOptions", take: Callable[..., None]
) -> None:
    from atoll.bench.serve import ServeOptions, run_serve
    from atoll.bench.serve_data import find_vocabulary, make_data
    from atoll.eval.endpoint import Endpoint, find_endpoint

    # A bad option is told before the server is asked.
    ServeOptions(Endpoint(base_url, model or ""), **load)
    options = ServeOptions(find_endpoint(base_url, model=model, api_key=api_key), **load)
    vocabulary = find_vocabulary(options.endpoint)
    conversations = make_data(dataset, data, vocabulary, chat=options.chat)
    if vocabulary.token_ids is None and dataset != "file":
        typer.echo("the server has no /tokenize, so lengths of prompts are a guess; the counts are the server's", err=True)
    with _progress(data.num_prompts) as on_request:
        run = run_serve(options, conversations, on_request)
    take(run, backend=_backend(options), base_url=options.endpoint.base_url, model_id=options.endpoint.model)


def _run_offline(options: "OfflineOptions") -> "ServeRun":
    from atoll.bench.serve_offline import run_offline

    with _progress(options.data.num_prompts) as on_request:
        return run_offline(options, on_request)


def _run_both(options: "OfflineOptions", num_rounds: int, take: Callable[..., None], *, as_json: bool) -> None:
    from atoll.bench.serve_launch import Round, ratio, ratio_lines, run_both, throughputs

    def on_round(one: Round) -> None:
        if not as_json:
            typer.echo(f"round {one.number + 1} of {num_rounds}, {one.side}:")
        take(one.run, backend=_backend(options.load) if one.side == "server" else "offline", base_url=None, round=one.number)

    done = run_both(options, num_rounds, on_round)
    if as_json:
        write_json({side: throughputs(done, side) for side in ("server", "offline")} | {"server_of_offline": ratio(done)})
    else:
        typer.echo("\n".join(ratio_lines(done)))


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[], None]]:
    from rich.progress import Progress

    console = stderr_console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=num_requests)
        yield lambda: progress.advance(bar)


def _result_name(found: dict[str, Any]) -> str:
    concurrency = f"-concurrency{found['max_concurrency']}" if found["max_concurrency"] is not None else ""
    label = found["label"] or found["backend"]
    return f"{label}-{found['request_rate']}qps{concurrency}-{str(found['model_id']).rpartition('/')[2]}-{found['date']}.json"


def _save(path: Path, found: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    except OSError as error:
        raise ConfigError(f"result {path} cannot be written: {error.strerror}; name a folder that you may write to with --result-dir") from error


def bench_ab(
    a: Annotated[str, typer.Argument(help="A shell command.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    value: Annotated[
        str | None, typer.Option(help="Key in the last JSON line that is printed, such as output_throughput.", show_default="seconds that the command takes")
    ] = None,
    load: Annotated[
        str | None, typer.Option(help="A and B are servers; this command, such as 'atoll bench serve --json', loads each and prints.", show_default=False)
    ] = None,
    ready_url: Annotated[str, typer.Option(help="Answers with 200 once a server is ready.")] = f"{DEFAULT_URL}/health",
    ready_timeout_s: Annotated[float, typer.Option(help="A server may take so long to start.", min=0)] = 600.0,
    restarts: Annotated[int, typer.Option(help="Of each command.", min=2, max=10)] = 5,
    warmups: Annotated[int, typer.Option(help="Restarts of each that are not counted.", min=0)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run two commands in alternating restarts: the difference of their means beside what one of them differs by from restart to restart."""
    from atoll.bench.ab import AbOptions, report_lines, run_ab

    options = AbOptions(a, b, restarts, warmups, value, load, ready_url, ready_timeout_s)
    with stderr_console().status("running both commands in turn"):
        report = run_ab(options, lambda name, one: typer.echo(f"{name} {one:.6g}", err=True))
    if as_json:
        derived = {name: getattr(report, name) for name in ("difference", "noise", "difference_stderr", "p")}
        write_json(asdict(options) | {"values_a": report.a, "values_b": report.b} | derived)
    else:
        typer.echo("\n".join(report_lines(report, value or "seconds")))
