"""docs/commands.md is what the commands are now, and what their --help says."""

import inspect
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli import app
from tools.commands_page import PAGE, commands, main, render_page

SECTIONS = dict(re.findall(r"^## (atoll .+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render_page(), "scripts/fix makes it anew"


def test_control_a_stale_page_is_found_and_mended(tmp_path: Path) -> None:
    page = tmp_path / "commands.md"
    page.write_text(PAGE.read_text().replace("`8000`", "`9000`"))
    assert page.read_text() != render_page()
    main(page)
    assert page.read_text() == render_page()


def test_every_command_has_its_section() -> None:
    assert list(SECTIONS) == [name for name, _ in commands(app, "atoll")]
    assert {"atoll serve", "atoll generate", "atoll bench serve", "atoll bench ab", "atoll eval compare", "atoll probe kernels"} <= set(SECTIONS)


@pytest.mark.parametrize("name", list(SECTIONS))
def test_a_section_has_the_flags_of_the_help(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300", "NO_COLOR": "1"})
    assert result.exit_code == 0
    # A help may name another command's flag in its words; flags of its own begin a line.
    beginnings = re.findall(r"^[│ *]*((?:--[a-z][\w-]*[ ,]*)+)", result.stdout, re.MULTILINE)
    helped = {flag for beginning in beginnings for flag in FLAG.findall(beginning)} - {"--help"}
    shown = {flag for row in re.findall(r"^\| (`--.*?) \| ", SECTIONS[name], re.MULTILINE) for flag in FLAG.findall(row)}
    assert shown == helped


def test_all_kinds_of_parameters() -> None:
    def example(
        first: Annotated[Path, typer.Argument(help="One.")],
        more: Annotated[list[str] | None, typer.Option(help="Two | three.", show_default=False)] = None,
        choice: Annotated[Literal["a", "b"], typer.Option("--pick", help="Four.")] = "a",
        on: Annotated[bool, typer.Option(help="Five.")] = True,
        off: Annotated[bool, typer.Option("--off", help="Six.")] = False,
        size: Annotated[int | None, typer.Option(help="Seven.", show_default="from the rest")] = None,
    ) -> None:
        """Do it."""

    small = typer.Typer()
    small.command()(example)
    text = render_page(small)
    expected = """
        ## atoll example

        Do it.

        | argument | takes | default | what it is |
        |---|---|---|---|
        | `FIRST` | path | must be given | One. |

        | option | takes | default | what it is |
        |---|---|---|---|
        | `--more` | text, repeatable |  | Two \\| three. |
        | `--pick` | `a`, `b` | `a` | Four. |
        | `--on`, `--no-on` |  | on | Five. |
        | `--off` |  | off | Six. |
        | `--size` | whole number | from the rest | Seven. |
    """
    assert text.endswith(inspect.cleandoc(expected) + "\n")
