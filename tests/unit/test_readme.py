"""What the README tells a newcomer to do works: the quick start's commands and its Python."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = (ROOT / "README.md").read_text().partition("## Quick start\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", QUICK_START, re.DOTALL)


def commands() -> list[list[str]]:
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line]


def run(command: list[str]) -> str:
    """Run one command in the repository; `.venv/bin/atoll` runs under the interpreter of these tests, whichever that is."""
    if command[0] == ".venv/bin/atoll":
        command = [sys.executable, "-c", "from atoll.cli import app; app()", *command[1:]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quick_start_has_what_these_tests_run() -> None:
    assert [command[0] for command in commands()] == ["scripts/run", "scripts/test", *[".venv/bin/atoll"] * 3]
    assert len(blocks("python")) == 2
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"atoll": "atoll.cli:app"}


def test_scripts_of_the_quick_start_parse() -> None:
    for command in commands()[:2]:
        assert run(["bash", "-n", *command]) == ""


@pytest.mark.parametrize(("index", "says"), [(2, "Paris"), (3, "reference"), (4, "clean")])
def test_command_of_the_quick_start(index: int, says: str) -> None:
    assert says in run(commands()[index])


@pytest.mark.parametrize(("index", "says"), [(0, "Paris"), (1, "")])
def test_python_of_the_quick_start(index: int, says: str) -> None:
    assert says in run([sys.executable, "-W", "error", "-c", blocks("python")[index]])


def test_a_failing_command_fails() -> None:
    with pytest.raises(AssertionError, match="no-such-model"):
        run([".venv/bin/atoll", "generate", "--model", "no-such-model", "x"])
