"""`atoll serve`: the OpenAI-compatible server."""

import logging
from typing import Annotated, Any

import typer

from atoll.cli.base import stderr_console
from atoll.config import EngineConfig, ServerConfig, make_engine_config


def serve(
    model: Annotated[str, typer.Option(help="'demo', 'smollm2', a Hugging Face folder, a .gguf file, or random:SHAPE, of random weights.")] = "demo",
    served_model_name: Annotated[str | None, typer.Option(help="The name that clients use.", show_default="as --model")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's; give an API key with it.")] = ServerConfig.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = ServerConfig.port,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send; better in ATOLL_API_KEY, which other users of the machine cannot see.", show_default=False)
    ] = None,
    max_queued: Annotated[int, typer.Option(help="Sequences accepted beyond those that run; more are refused with 429.")] = ServerConfig.max_queued,
    max_n: Annotated[int, typer.Option(help="Sequences for one prompt, at most.")] = ServerConfig.max_n,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of a request, at most.")] = ServerConfig.max_body_bytes,
    shutdown_s: Annotated[float, typer.Option(help="Seconds that running requests have to finish after SIGTERM.")] = ServerConfig.shutdown_s,
    num_text_threads: Annotated[int, typer.Option(help="Threads that tokenize.")] = ServerConfig.num_text_threads,
    log_level: Annotated[str, typer.Option(help="debug, info (with a line per request), warning, error.")] = "warning",
    kv_format: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32, fp8_tensor, fp8_token.")] = "auto",
    kv_fill: Annotated[str, typer.Option(help="The pool's bytes at start: zero, nan, random, ...; no answer may depend on it.")] = "zero",
    page_size: Annotated[int, typer.Option(help="Tokens per page, a power of two.")] = 16,
    num_pages: Annotated[int | None, typer.Option(help="Pages of the pool.", show_default="from the memory at hand")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together, at most.", show_default="what model and pool allow")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = EngineConfig.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step.")] = EngineConfig.max_num_batched_tokens,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse what prompts have in common.")] = EngineConfig.prefix_caching,
    state_checkpoint_interval_tokens: Annotated[
        int | None, typer.Option(help="Of a hybrid model: tokens between kept states; 0: keep none, -1: no ladder.", show_default="from the state's size")
    ] = None,
    checkpoint_policy: Annotated[str, typer.Option(help="Where states are kept: all, or some of ladder,prompt,demand,end.")] = EngineConfig.checkpoint_policy,
    attention_backend: Annotated[str, typer.Option(help="auto, triton, reference, flashinfer_xqa, flashinfer_tensor_cores, leaky.")] = "auto",
    guard: Annotated[str, typer.Option(help="Zero released pages: on, off, or auto, which is on where attention does not mask unowned rows.")] = "auto",
    seed: Annotated[int, typer.Option(help="For requests without a seed of their own.")] = EngineConfig.seed,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it, until SIGTERM or Ctrl-C."""
    engine_options = {
        "kv_format": kv_format,
        "kv_fill": kv_fill,
        "page_size": page_size,
        "num_pages": num_pages,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefix_caching": prefix_caching,
        "state_checkpoint_interval_tokens": state_checkpoint_interval_tokens,
        "checkpoint_policy": checkpoint_policy,
        "attention_backend": attention_backend,
        "guard": guard,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    server_options: dict[str, Any] = {
        "host": host,
        "port": port,
        "max_queued": max_queued,
        "max_n": max_n,
        "max_body_bytes": max_body_bytes,
        "shutdown_s": shutdown_s,
        "num_text_threads": num_text_threads,
        "log_level": log_level,
    } | ({} if api_key is None else {"api_key": api_key})
    # A bad option is told before the slow imports.
    config = make_engine_config(engine_options)
    server_config = ServerConfig(**server_options)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from atoll.server.engine_process import EngineProcess

    with EngineProcess(model, config, log_level=log_level) as engine:
        # While that loads the model.
        from atoll import __version__
        from atoll.server.serve import serve as serve_until_signal
        from atoll.server.service import Service

        with stderr_console().status(f"loading {model}"):
            engine.wait_until_ready()
        service = Service(engine, served_model_name or model, server_config, __version__)
        serve_until_signal(service, on_listen=lambda address: _say_ready(address, service.model_name))


def _say_ready(address: str, model_name: str) -> None:
    typer.echo(f"{model_name} is served at {address}/v1, with a page at {address} (Ctrl-C stops)", err=True)
