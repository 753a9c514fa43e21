"""The code blocks of a page, and how they are run: as a reader would, but for the address of the server and the interpreter."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"  # of the server, as the pages have it
LANGUAGES = ("sh", "python", "text")
# Why a block may stand there without being run.
EXCUSES = ("starts a server", "takes minutes", "needs Chromium", "needs a GPU and a checkpoint")

# On a CPU wherever the tests run, since the pages say what it says there; and to this machine without a proxy.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "no_proxy": "*"}

_BLOCK = re.compile(r"(?:^<!-- (?P<mark>not run|file): (?P<what>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. `# exits with 1` behind a command names its exit code."""

    language: str
    text: str
    line: int
    excuse: str | None = None  # why it is not run
    file: str | None = None  # where it is saved; then it is not run either
    output: str | None = None  # the block of text that follows it, with `...` for what may differ

    @property
    def code(self) -> int:
        found = re.search(r"# exits with (\d+)$", self.text.strip())
        return int(found.group(1)) if found else 0


def find_blocks(page: str) -> list[Block]:
    """All blocks but those of text, which belong to the block before them. Raises ValueError for a language or an excuse that is not known."""
    blocks: list[Block] = []
    for match in _BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("language")) + 1
        language, text, mark, what = match["language"], match["text"], match["mark"], match["what"]
        if language not in LANGUAGES:
            raise ValueError(f"line {line}: a block of {language!r}; use one of {', '.join(LANGUAGES)}")
        if mark == "not run" and what not in EXCUSES:
            raise ValueError(f"line {line}: not run because it {what}; only what {', '.join(EXCUSES)} is excused")
        if language != "text":
            blocks.append(Block(language, text, line, excuse=what if mark == "not run" else None, file=what if mark == "file" else None))
        elif blocks:
            last = blocks.pop()
            blocks.append(Block(last.language, last.text, last.line, last.excuse, last.file, text))
    return blocks


def make_command(folder: Path) -> Path:
    """A folder for PATH in which `atoll` runs under the interpreter of these tests."""
    folder.mkdir()
    command = folder / "atoll"
    # -P: a file beside the reader's shell is found through PYTHONPATH alone, as with the installed command.
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}" exec {shlex.quote(sys.executable)} -P -W error -m atoll "$@"\n')
    command.chmod(0o755)
    return folder


def make_checkout(root: Path, path: Path) -> Path:
    """A folder in which `.venv/bin/atoll` is that command too."""
    (root / ".venv").mkdir(parents=True)
    (root / ".venv" / "bin").symlink_to(path)
    return root


def run_block(block: Block, folder: Path, path: Path, url: str) -> None:
    """Run one block in `folder`, `path` before all others on PATH. Raises AssertionError where it ends or says otherwise than the page has it."""
    text = block.text.replace(ADDRESS, url)
    if block.file is not None:
        (folder / block.file).write_text(text)
        return
    if block.excuse is not None:
        return
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-W", "error", "-c", text]
    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{path}:{os.environ['PATH']}"}
    if block.language == "python":
        environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    place = f"line {block.line}: {block.text}"
    assert result.returncode == block.code, f"{place}ended with {result.returncode}, not {block.code}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    missing = [line for line in (block.output or "").splitlines() if not is_said(line, result.stdout)]
    assert not missing, f"{place}did not say {missing[0]!r}, but\n{result.stdout}"


def is_said(line: str, output: str) -> bool:
    """Whether a line of the output holds this one, its parts around `...` in order. Blanks count as one."""
    parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
    pattern = re.compile(".*".join(parts))
    return any(pattern.search(" ".join(one.split())) for one in output.splitlines())
