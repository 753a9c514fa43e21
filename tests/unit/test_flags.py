"""Groups of flags that several commands share."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from atoll.cli.flags import spread


@dataclass(frozen=True)
class Group:
    size: Annotated[int, typer.Option(min=1)] = 3
    names: Annotated[list[str] | None, typer.Option()] = None


def test_a_group_of_flags_stands_in_a_commands_parameters() -> None:
    seen: list[object] = []

    @spread
    def command(word: Annotated[str, typer.Argument()], *, group: Group, loud: bool = False) -> None:
        seen.append((word, group, loud))

    toy = typer.Typer()
    toy.command()(command)
    assert CliRunner().invoke(toy, ["a"]).exit_code == 0
    assert CliRunner().invoke(toy, ["b", "--size", "5", "--names", "x", "--names", "y", "--loud"]).exit_code == 0
    assert seen == [("a", Group(), False), ("b", Group(5, ["x", "y"]), True)]
    assert CliRunner().invoke(toy, ["c", "--size", "0"]).exit_code == 2, "the field's own limits hold"
    assert len(seen) == 2
