"""`atoll generate`: complete prompts, streaming to the terminal, or as JSON lines."""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.base import EXIT_FOUND, fail, stderr_console, write_json
from atoll.cli.flags import EngineFlags, spread
from atoll.config import EngineConfig, make_engine_config
from atoll.engine.sampling import SamplingParams
from atoll.errors import RequestError

if TYPE_CHECKING:
    from atoll import LLM, RequestOutput, StreamPiece

STDIN = "-"


@spread
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; '-' reads one from standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.", exists=True, dir_okay=False, show_default=False)] = None,
    model: Annotated[str, typer.Option(help="'demo', 'smollm2', a Hugging Face folder, a .gguf file, or random:SHAPE, of random weights.")] = "demo",
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template, as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Probability kept, from the most likely token down.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the most likely token's probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an output; may be given again.", show_default=False)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")] = False,
    kv_fill: Annotated[str, typer.Option(help="The pool's bytes at start: zero, nan, random, ...; the output must not depend on it.")] = EngineConfig.kv_fill,
    *,
    flags: EngineFlags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finished prompt, in the order in which they finish.")] = False,
) -> None:
    """Complete prompts with a model, as it speaks; several prompts run together in one batch."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop or (), ignore_eos=ignore_eos
    )
    options = flags.options | {"kv_fill": kv_fill}
    make_engine_config(options)  # a bad option is told before the slow imports
    texts = _read_prompts(prompts or [], file)
    with _load(model, options) as llm:
        pieces = llm.generate_stream(llm.chat_prompts([[{"role": "user", "content": text}] for text in texts]) if chat else texts, params)
        if as_json:
            outputs = _stream_json(pieces, texts)
        elif len(texts) == 1 or sys.stdout.isatty() or not sys.stderr.isatty():
            outputs = _stream_text(pieces, texts)
        else:
            outputs = _collect_text(pieces, texts)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        typer.echo(f"error: request {output.request_id}: {output.error}", err=True)
    if failed:
        raise typer.Exit(EXIT_FOUND)


def _read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    if arguments.count(STDIN) > 1:
        fail(f"'-' is given {arguments.count(STDIN)} times, and standard input holds one prompt; give '-' once, or use --file")
    # Read as bytes: prompts are UTF-8, whatever the locale is.
    texts = [
        _utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n") if text == STDIN else _utf8(os.fsencode(text), "a prompt") for text in arguments
    ]
    if file is not None:
        texts += [line for line in _utf8(file.read_bytes(), f"--file {file}").split("\n") if line.strip()]
    if not texts:
        fail("no prompt is given; pass it as an argument, pipe it to 'atoll generate -', or name a file with --file")
    return texts


def _utf8(raw: bytes, source: str) -> str:
    """Text without a byte order mark, its lines ended by a newline alone."""
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}; convert it to UTF-8") from error


def _load(model: str, options: dict[str, object]) -> "LLM":
    console = stderr_console()
    with console.status(f"loading {model}") if console.is_terminal else nullcontext():
        from atoll import LLM

        return LLM(model, **options)


def _stream_json(pieces: "Iterable[StreamPiece]", texts: list[str]) -> "list[RequestOutput]":
    outputs = []
    for piece in pieces:
        if piece.output is None:
            continue
        output = piece.output
        outputs.append(output)
        write_json(
            {
                "index": piece.index,
                "prompt": texts[piece.index],
                "text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "error": output.error,
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": output.token_ids,
                "num_cached_tokens": output.num_cached_tokens,
            }
        )
    return outputs


def _stream_text(pieces: "Iterable[StreamPiece]", texts: list[str]) -> "list[RequestOutput]":
    """Text as it comes. Of several prompts the first unfinished one streams; what others say meanwhile waits its turn."""
    waiting: dict[int, list[str]] = {index: [] for index in range(len(texts))}
    finished: dict[int, RequestOutput] = {}
    current = 0
    _begin(current, texts)
    for piece in pieces:
        waiting[piece.index].append(piece.text)
        if piece.output is not None:
            finished[piece.index] = piece.output
        while current < len(texts):
            sys.stdout.write("".join(waiting[current]))
            waiting[current].clear()
            if current not in finished:
                break
            sys.stdout.write("\n")
            current += 1
            if current < len(texts):
                _begin(current, texts)
        sys.stdout.flush()
    return [finished[index] for index in sorted(finished)]


def _collect_text(pieces: "Iterable[StreamPiece]", texts: list[str]) -> "list[RequestOutput]":
    """Whole texts in order at the end, and until then a progress bar on stderr: for a terminal that does not show the texts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    finished: dict[int, RequestOutput] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    console = stderr_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(texts), tokens=0)
        num_tokens = 0
        for piece in pieces:
            num_tokens += len(piece.token_ids)
            if piece.output is not None:
                finished[piece.index] = piece.output
            progress.update(task, completed=len(finished), tokens=num_tokens)
    for index, output in sorted(finished.items()):
        _begin(index, texts)
        sys.stdout.write(output.text + "\n")
    return [finished[index] for index in sorted(finished)]


def _begin(index: int, texts: list[str]) -> None:
    """Several outputs are told apart by their prompts."""
    if len(texts) == 1:
        return
    blank = "\n" if index else ""
    style: Callable[[str], str] = (lambda text: typer.style(text, bold=True)) if sys.stdout.isatty() else str
    sys.stdout.write(f"{blank}{style(f'[{index + 1}] {texts[index]}')}\n")
