"""`scripts/run`: the demo model is served, it says where to look once it answers, and whoever stops it has stopped it in good order."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "512", "--num-pages", "400")
WAIT_S = 60


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose environment is the one of these tests: nothing is installed."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "scripts").mkdir()
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "run", root / "scripts" / "run")
    write_script(root / "scripts" / "setup", "true")
    write_script(root / ".venv" / "bin" / "atoll", f'exec env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m atoll "$@"')
    return root


def write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@contextmanager
def running(tree: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`scripts/run` from another folder; ended by force if the test leaves it running."""
    command = [str(tree / "scripts" / "run"), *OPTIONS, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree.parent, start_new_session=True) as process:
        killer = threading.Timer(WAIT_S, process.kill)
        killer.start()
        try:
            yield process
        finally:
            killer.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def wait_for_imports(process: subprocess.Popen[str]) -> None:
    """Until the tokenizers' library is being loaded: the command has begun, and does not listen yet."""
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + WAIT_S
    while "tokenizers" not in maps.read_text():
        assert time.monotonic() < deadline and process.poll() is None, "the command does not load the tokenizers' library"
        time.sleep(0.01)


def test_it_says_where_to_look_and_ends_well(tree: Path) -> None:
    with running(tree, "--port", "0") as first:
        where, how = said(first), said(first)
        page, api = where.split("a page at ")[1].split()[0], where.split("served at ")[1].split(",")[0]
        assert page.startswith("http://127.0.0.1:") and api == f"{page}/v1" and "Ctrl-C stops" in where
        # It answers as soon as it has said so.
        assert "Atoll" in httpx2.get(page).text and httpx2.get(f"{api}/models").json()["data"][0]["id"] == "demo"
        curl = [*shlex.split(how.removeprefix("try: ")), "--silent", "--show-error", "--fail", "--noproxy", "*"]
        assert curl[0] == "curl"
        answer = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
        assert "demo model" in answer
        # The port is taken now.
        with running(tree, "--port", page.rpartition(":")[2]) as second:
            out, error = second.communicate(timeout=WAIT_S)
            assert second.returncode == 2 and out == ""
            assert f"cannot listen on 127.0.0.1 port {page.rpartition(':')[2]}: Address already in use; use another --port" in error
            assert len(error.splitlines()) == 1
        assert httpx2.get(f"{page}/health").status_code == 200
        # Ctrl-C reaches every process in front of the terminal.
        os.killpg(first.pid, signal.SIGINT)
        out, error = first.communicate(timeout=WAIT_S)
        assert (first.returncode, out, error) == (0, "", "\nstopping: what runs has 30 s to finish (Ctrl-C ends it now)\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads(tree: Path, number: signal.Signals) -> None:
    with running(tree, "--port", "0") as process:
        wait_for_imports(process)
        process.send_signal(number)
        out, error = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, error) == (0, "", "")


def test_arguments_go_to_the_server(tree: Path) -> None:
    with running(tree, "--kv-format", "fp7") as process:
        _, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2 and "kv_format 'fp7' is unknown" in error


def test_control_a_shell_between_would_not_end_well(tree: Path) -> None:
    script = tree / "scripts" / "run"
    text = script.read_text()
    try:
        script.write_text(text.replace("exec ", ""))
        with running(tree, "--port", "0") as process:
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == -signal.SIGTERM
    finally:
        script.write_text(text)
