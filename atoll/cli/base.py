"""What all commands share: how errors end a command, where text goes, which device is meant. Imports no torch by itself."""

import errno
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from atoll.errors import AtollError, ConfigError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

EXIT_FOUND = 1  # the command ran and found what it looks for: a leak, a difference, a failed gate
EXIT_ERROR = 2  # it could not run: usage, a backend that refused, a model that is missing
EXIT_INTERRUPT = 130


class AtollGroup(TyperGroup):
    """Ends a command by an AtollError with one line and no traceback, and by Ctrl-C with the shell's usual code."""

    def invoke(self, ctx: Any) -> Any:
        # A terminal without some character shows an escape in its place.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except AtollError as error:
            fail(str(error))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _drop_stdout()
            fail("the disk is full, the output is incomplete; free some space, or send it elsewhere")
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPT) from None


def fail(message: str) -> None:
    """Print one line on stderr and end the command."""
    typer.secho(f"error: {message}", fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
    raise typer.Exit(EXIT_ERROR)


def _drop_stdout() -> None:
    """Point stdout at nothing, or its unwritten rest would fail once more as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(value: object) -> None:
    """One line on stdout, at once."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=not utf8) + "\n")
    sys.stdout.flush()


def stderr_console() -> "Console":
    """Progress and remarks; stdout is kept for results."""
    from rich.console import Console

    return Console(stderr=True)


def stdout_console() -> "Console":
    from rich.console import Console

    # Into a pipe or a file a table is as wide as it needs to be, so that no cell is cut.
    return Console() if sys.stdout.isatty() else Console(width=200)


def torch_device(name: str) -> "torch.device":
    """`auto`, `cpu`, `cuda` or `cuda:1`. Raises ConfigError for one that is not here."""
    from atoll.engine.build import choose_device

    return choose_device(name)


def engine_option(text: str) -> tuple[str, object]:
    """`name=value`, the value a whole number, true, false or none where it reads like one."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"option {text!r} is not of the form name=value; give for example --option num_pages=400")
    named: dict[str, object] = {"true": True, "false": False, "none": None}
    if value.lower() in named:
        return name, named[value.lower()]
    return name, int(value) if value.lstrip("-").isdecimal() else value


def json_object(text: str | None) -> dict[str, Any]:
    """Of --extra-body; none given is an empty one."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r} is no JSON: {error}; give an object") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body {text!r} is a {type(found).__name__}; give a JSON object")
    return found
