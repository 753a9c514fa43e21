"""What the README tells a newcomer to do works: its scripts, its commands and its Python."""

import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, find_blocks, make_checkout, make_command, run_block

README = (ROOT / "README.md").read_text()
BLOCKS = find_blocks(README)
RUN = [block for block in BLOCKS if block.excuse is None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_command(tmp_path_factory.mktemp("path") / "bin")


def test_readme_has_what_these_tests_run() -> None:
    assert [block.language for block in RUN] == ["sh", "python", "python"]
    assert all(block.line < README[: README.index("\n## Serve\n")].count("\n") for block in RUN), "the quick start is all that is run"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"atoll": "atoll.cli:app"}


def test_scripts_of_the_quick_start_parse() -> None:
    scripts = [line.split()[0] for line in BLOCKS[0].text.splitlines()]
    assert scripts == ["scripts/run", "scripts/test"]
    for script in scripts:
        assert subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, check=True).stderr == b""


@pytest.mark.slow
@pytest.mark.parametrize(("index", "says"), [(0, "Paris\natoll ...\nreference on ...: 5 cases: 5 clean"), (1, "Paris"), (2, "")])
def test_block_of_the_quick_start(index: int, says: str, path: Path, tmp_path: Path) -> None:
    block = RUN[index]
    assert block.output is None
    run_block(replace(block, output=says), make_checkout(tmp_path, path), path, "")


def test_a_failing_command_fails(path: Path, tmp_path: Path) -> None:
    [block] = find_blocks("```sh\n.venv/bin/atoll generate --model no-such-model x\n```\n")
    with pytest.raises(AssertionError, match="no-such-model"):
        run_block(block, make_checkout(tmp_path, path), path, "")
