"""Makes docs/commands.md, every flag of every command, from the functions behind `atoll`; `python -m tools.commands_page` writes it."""

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import typer
from typer.models import ArgumentInfo, OptionInfo

from atoll.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

HEAD = """# Commands

Every flag of every command, as `atoll COMMAND --help` shows it. This page is made from the commands themselves by `scripts/fix`.

A command ends with 0 when all is well, with 1 when it found what it looks for (a leak, a difference, a failed request), with 2 when it could not run,
and with 130 after Ctrl-C; `atoll serve` ends with 0 after Ctrl-C or SIGTERM. Results go to standard output, progress and remarks to standard error.
"""
KINDS = {str: "text", int: "whole number", float: "number", Path: "path"}


def render_page(root: typer.Typer = app) -> str:
    """The page's whole text."""
    parts = [HEAD]
    for name, function in commands(root, "atoll"):
        parts += [f"## {name}\n", inspect.cleandoc(function.__doc__ or "") + "\n"]
        for title, rows in (("argument", arguments(function)), ("option", options(function))):
            if rows:
                parts.append("\n".join([f"| {title} | takes | default | what it is |", "|---|---|---|---|", *(row(cells) for cells in rows)]) + "\n")
    return "\n".join(parts)


def commands(group: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Full name and function of each command, groups after what stands beside them."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for nested in group.registered_groups:
        assert nested.typer_instance is not None
        yield from commands(nested.typer_instance, f"{name} {nested.name}")


def arguments(function: Callable[..., Any]) -> list[tuple[str, ...]]:
    return [(f"`{name.upper()}`", kind, default, info.help or "") for name, info, kind, default in parameters(function) if isinstance(info, ArgumentInfo)]


def options(function: Callable[..., Any]) -> list[tuple[str, ...]]:
    return [(spelling(name, info, kind), kind, default, info.help or "") for name, info, kind, default in parameters(function) if isinstance(info, OptionInfo)]


def parameters(function: Callable[..., Any]) -> Iterator[tuple[str, OptionInfo | ArgumentInfo, str, str]]:
    """Name, declaration, what it takes and its default as text."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        # A default of None wraps the declaration once more.
        while typing.get_origin(hint) in (typing.Union, UnionType):
            hint = next(one for one in typing.get_args(hint) if one is not NoneType)
        assert typing.get_origin(hint) is Annotated, f"{function.__name__}: {name} has no declaration"
        taken, info = typing.get_args(hint)
        yield name, info, takes(taken), default_text(info, parameter.default)


def takes(kind: Any) -> str:
    """A word for a type, the choices of a Literal, and nothing for a switch."""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        kind = next(one for one in typing.get_args(kind) if one is not NoneType)
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{one}`" for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"{takes(typing.get_args(kind)[0])}, repeatable"
    return "" if kind is bool else KINDS[kind]


def default_text(info: OptionInfo | ArgumentInfo, default: Any) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    if default is inspect.Parameter.empty:
        return "must be given"
    if default in (None, ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`"


def spelling(name: str, info: OptionInfo, kind: str) -> str:
    """The flags as typed; a switch without a name of its own has a `--no-` beside it."""
    flag = f"--{name.replace('_', '-')}"
    # In Annotated the first name stands where a default would.
    names = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    declared = [part.strip() for one in names for part in one.split("/")]
    return ", ".join(f"`{one}`" for one in (declared or ([flag] if kind else [flag, f"--no-{flag[2:]}"])))


def row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(page: Path = PAGE) -> None:
    page.write_text(render_page())


if __name__ == "__main__":
    main()
