"""`atoll serve`: the OpenAI-compatible server."""

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.base import EXIT_FOUND, stderr_console
from atoll.cli.flags import EngineFlags, spread
from atoll.config import EngineConfig, ServerConfig, make_engine_config
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.server.service import Service
    from atoll.server.signals import Interrupt


@spread
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
    tool_call_parser: Annotated[
        str, typer.Option(help="How the model spells calls of functions: qwen_json, qwen_xml, or auto, as its chat template does.")
    ] = ServerConfig.tool_call_parser,
    log_level: Annotated[str, typer.Option(help="debug, info (with a line per request), warning, error.")] = "warning",
    kv_fill: Annotated[str, typer.Option(help="The pool's bytes at start: zero, nan, random, ...; no answer may depend on it.")] = EngineConfig.kv_fill,
    seed: Annotated[int, typer.Option(help="For requests without a seed of their own.")] = EngineConfig.seed,
    *,
    flags: EngineFlags,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it, until SIGTERM or Ctrl-C.

    Exits with 1 when the engine has died before that.
    """
    engine_options = flags.options | {"kv_fill": kv_fill, "seed": seed}
    server_options: dict[str, Any] = {
        "host": host,
        "port": port,
        "max_queued": max_queued,
        "max_n": max_n,
        "max_body_bytes": max_body_bytes,
        "shutdown_s": shutdown_s,
        "num_text_threads": num_text_threads,
        "tool_call_parser": tool_call_parser,
        "log_level": log_level,
    } | ({} if api_key is None else {"api_key": api_key})
    # A bad option is told before the slow imports.
    if served_model_name is not None and not served_model_name.strip():
        raise ConfigError(f"served_model_name {served_model_name!r} is empty; give the name that clients use, or leave it out for that of --model")
    config = make_engine_config(engine_options)
    server_config = ServerConfig(**server_options)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from atoll.server.signals import Interrupt, stop_signals

    # Whoever stops a server that still loads has stopped it in good order, as later.
    interrupt = Interrupt()
    with stop_signals(interrupt):
        _serve(model, served_model_name, config, server_config, interrupt)


def _serve(model: str, served_model_name: str | None, config: EngineConfig, server_config: ServerConfig, interrupt: "Interrupt") -> None:
    with interrupt.held():
        from atoll.server.engine_process import EngineProcess

    with EngineProcess(model, config, log_level=server_config.log_level) as engine:
        # While that loads the model.
        with interrupt.held():
            from atoll import __version__
            from atoll.server.serve import open_socket
            from atoll.server.serve import serve as serve_until_signal
            from atoll.server.service import Service

        # A port that is taken is told before the model is loaded.
        open_socket(server_config).close()
        with stderr_console().status(f"loading {model}"):
            engine.wait_until_ready()
        service = Service(engine, served_model_name or model, server_config, __version__)
        serve_until_signal(service, on_listen=lambda address: _say_ready(address, service), on_interrupt=lambda: _say_stopping(server_config.shutdown_s))
        if service.loop.is_dead:
            raise typer.Exit(EXIT_FOUND)


def _say_ready(address: str, service: "Service") -> None:
    """Where people look, a request to try, and how to stop."""
    key = "" if service.config.api_key is None else """ -H "Authorization: Bearer $ATOLL_API_KEY\""""
    path, body = ("completions", '{"prompt": "Hello"}')
    if service.tokenizer.chat_template is not None:
        path, body = ("chat/completions", '{"messages": [{"role": "user", "content": "hello"}]}')
    typer.echo(f"{service.model_name} is served at {address}/v1, with a page at {address} (Ctrl-C stops)", err=True)
    typer.echo(f"try: curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'", err=True)


def _say_stopping(shutdown_s: float) -> None:
    # The terminal has written ^C, and no end of line.
    typer.echo(f"\nstopping: what runs has {shutdown_s:g} s to finish (Ctrl-C ends it now)", err=True)
