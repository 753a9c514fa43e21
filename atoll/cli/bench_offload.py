"""`atoll bench offload`: pages between the pool and host memory, the first token of a fetched prompt, and decode steps beside transfers."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from atoll.cli.base import EXIT_FOUND, fail, torch_device
from atoll.cli.bench import emit_rows, split_names, split_numbers
from atoll.config import make_engine_config
from atoll.engine.sampling import MAX_SEED
from atoll.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from atoll.bench.offload import OffloadCopyOptions
    from atoll.bench.offload_decode import DecodeBesideOptions
    from atoll.bench.offload_fetch import FetchOptions

PARTS = ("copies", "first-token", "decode")
LARGE = "qwen3.5-35b-a3b"
MIB = 1 << 20


def bench_offload(
    parts: Annotated[str, typer.Option(help="Comma-separated: copies, first-token, decode.")] = ",".join(PARTS),
    shape: Annotated[
        str | None,
        typer.Option(help="Of the copied pages, comma-separated: qwen3.5-35b-a3b, tiny, or a model by name.", show_default=f"{LARGE}; cpu: tiny"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="For first-token and decode, as for atoll serve.", show_default=f"random:{LARGE}; cpu: demo")] = None,
    kv_format: Annotated[str, typer.Option(help="Comma-separated: bf16, fp16, fp32, fp8_tensor, fp8_token.")] = "bf16",
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    transfer_mib: Annotated[str | None, typer.Option(help="Of one transfer of the copies, comma-separated.", show_default="1024; cpu: 64")] = None,
    issue: Annotated[str, typer.Option(help="How copies are issued, comma-separated: batch, each, torch. A CPU has one way.")] = "batch,each,torch",
    context: Annotated[int | None, typer.Option(help="Tokens of the fetched prompt.", min=2, show_default="32768; cpu: 256")] = None,
    offload: Annotated[str | None, typer.Option(help="Tiers that it is fetched from.", show_default="host:8GiB; cpu: host:256MiB")] = None,
    batch: Annotated[str, typer.Option(help="Sequences of the decode steps, comma-separated.")] = "16",
    decode_context: Annotated[int | None, typer.Option(help="Tokens of each.", min=2, show_default="1024; cpu: 256")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of everything; the median counts.", min=1)] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of one sample.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Of weights, prompts, pages and bytes.", min=0, max=MAX_SEED)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Append rows to this JSONL file; makes its folder.", show_default=False)] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note in rows.", show_default="the checkout's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON lines on stdout.")] = False,
) -> None:
    """Time what leaves the pool and comes back: bytes per second against one pinned copy, a fetched prompt's first token, decode steps beside transfers."""
    wanted, formats = split_names(parts), split_names(kv_format)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise ConfigError(f"--parts {parts!r} has {unknown[0]!r}; use some of {', '.join(PARTS)}")
    target = torch_device(device)
    on_gpu = target.type == "cuda"
    shapes = split_names(shape or (LARGE if on_gpu else "tiny"))
    model = model or (f"random:{LARGE}" if on_gpu else "demo")
    if not on_gpu and LARGE in model:
        fail(f"bench offload needs a GPU for the model {model!r}, this is {target}; pass --model demo to try the command out")
    for one in formats:
        make_engine_config({"device": device, "dtype": dtype, "kv_format": one, "page_size": page_size})
    transfer_mibs = split_numbers("--transfer-mib", transfer_mib or ("1024" if on_gpu else "64"))
    batches = split_numbers("--batch", batch)
    from atoll.bench.offload import OffloadCopyOptions
    from atoll.bench.offload_decode import DecodeBesideOptions
    from atoll.bench.offload_fetch import FetchOptions
    from atoll.bench.rows import check_writable, environment
    from atoll.offload.stream_copier import Issue

    if out is not None:
        check_writable(out)
    env = asdict(environment(target, commit))

    def keep(part: str, row: dict[str, Any], line: str) -> None:
        # At once: a later part may run out of memory.
        emit_rows([{"part": part} | row | env], out, as_json=as_json)
        if not as_json:
            typer.echo(line)

    faults: list[str] = []
    if "copies" in wanted:
        sizes = tuple(size * MIB for size in transfer_mibs)
        issues = cast("tuple[Issue, ...]", split_names(issue))
        limit_bytes = (1024 if on_gpu else 64) * MIB
        faults += _run_copies(OffloadCopyOptions(shapes, formats, page_size, sizes, limit_bytes, issues, rounds, target, seed), keep)
    if "decode" in wanted or "first-token" in wanted:
        loaded = _load(model, target, dtype)
        for one in formats:
            if "decode" in wanted:
                for count in batches:
                    tokens = decode_context or (1024 if on_gpu else 256)
                    moved_bytes = (64 if on_gpu else 4) * MIB
                    _run_decode(loaded, DecodeBesideOptions(model, count, tokens, one, page_size, moved_bytes, rounds, steps, target, seed), keep)
            if "first-token" in wanted:
                tiers = offload or ("host:8GiB" if on_gpu else "host:256MiB")
                faults += _run_fetch(loaded, FetchOptions(model, context or (32768 if on_gpu else 256), one, page_size, tiers, rounds, seed), keep)
    for fault in faults:
        typer.echo(f"gate failed: {fault}", err=True)
    if faults:
        raise typer.Exit(EXIT_FOUND)


def _load(model: str, device: "torch.device", dtype: str) -> Any:
    from atoll.engine.build import choose_dtype
    from atoll.models.loader import load_model

    return load_model(model, device=device, dtype=choose_dtype(dtype))


def _run_copies(options: "OffloadCopyOptions", keep: Any) -> list[str]:
    from atoll.bench.offload import OffloadCopyRow, case_line, copy_line, run_offload_copies

    def keep_all(rows: list[OffloadCopyRow]) -> None:
        for i, row in enumerate(rows):
            line = copy_line(row)
            keep("copies", asdict(row) | {"gbps": row.gbps, "share": row.share}, f"{case_line(row)}\n{line}" if i == 0 else line)

    return run_offload_copies(options, on_case=keep_all).gate_failures


def _run_decode(loaded: Any, options: "DecodeBesideOptions", keep: Any) -> None:
    from atoll.bench.offload_decode import decode_line, time_decode_beside

    time_decode_beside(loaded, options, on_row=lambda row: keep("decode", asdict(row), decode_line(row)))


def _run_fetch(loaded: Any, options: "FetchOptions", keep: Any) -> list[str]:
    from atoll.bench.offload_fetch import fetch_line, time_fetch

    row = time_fetch(loaded, options)
    keep("first-token", asdict(row) | {"speedup": row.speedup}, fetch_line(row))
    return [row.fault] if row.fault is not None else []
