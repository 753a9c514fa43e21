"""SIGTERM to a real server under load: what runs finishes, what waits is told so, and the process ends well."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.server import serve
from atoll.server.serve import DrainingServer
from tests.server.running import running_server

OPTIONS = ("--device", "cpu", "--port", "0", "--max-num-seqs", "4", "--max-model-len", "512", "--num-pages", "400")
# What runs when a signal comes is to finish, however busy the machine: only the test's own end bounds it.
PATIENT = ("--shutdown-s", "600")
WAIT_S = 300


@contextmanager
def server_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`atoll serve` and its address; ended by force if the test leaves it running."""
    command = [sys.executable, "-m", "atoll", "serve", *OPTIONS, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            assert "is served at http://127.0.0.1:" in line, line + process.stderr.read()
            assert process.stderr.readline().startswith("try: curl http://127.0.0.1:")
            yield process, line.split("served at ")[1].split("/v1")[0]
        finally:
            process.kill()


def ask(url: str, max_tokens: int, streams: bool, begun: threading.Event) -> tuple[int, Any]:
    """Status, and the tokens or the error that came."""
    body = {"prompt": f"{max_tokens} marbles", "max_tokens": max_tokens, "ignore_eos": True, "stream": streams, "return_token_ids": True}
    with httpx2.Client(base_url=url, timeout=WAIT_S) as http, http.stream("POST", "/v1/completions", json=body) as response:
        if not streams or response.status_code != 200:
            answer = json.loads(response.read())
            return response.status_code, len(answer["choices"][0]["token_ids"]) if "choices" in answer else answer["error"]["message"]
        count, error = 0, None
        for line in response.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                chunk = json.loads(line.removeprefix("data: "))
                error = chunk["error"]["message"] if "error" in chunk else error
                count += len(chunk["choices"][0]["token_ids"]) if "choices" in chunk else 0
        return response.status_code, error or count


def run_clients(url: str, jobs: list[tuple[int, bool]], then: Any) -> list[tuple[int, Any]]:
    """Ask all at once; `then` runs when every stream that can run has begun."""
    results: list[Any] = [None] * len(jobs)
    begun = [threading.Event() for _ in jobs]

    def work(index: int) -> None:
        results[index] = ask(url, *jobs[index], begun[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for index, thread in enumerate(threads):
        thread.start()
        # In order, so that it is known which run.
        if index < 4 and jobs[index][1]:
            assert begun[index].wait(WAIT_S)
    then()
    for thread in threads:
        thread.join(WAIT_S)
    return results


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_refuses_what_waits() -> None:
    with server_process(*PATIENT) as (process, url):

        def terminate() -> None:
            waiting = 'num_requests_waiting{model_name="demo"} 5.0'
            wait_for(lambda: waiting in get(f"{url}/metrics").text, "the requests to wait")
            process.send_signal(signal.SIGTERM)

        jobs = [(150, True), (160, True), (170, True), (180, True), *[(5, False), (6, True), (7, False), (8, True), (9, False)]]
        results = run_clients(url, jobs, terminate)
        assert results[:4] == [(200, 150), (200, 160), (200, 170), (200, 180)]
        for status, message in results[4:]:
            assert status == 503 and "the server is stopping, and this request had not begun" in message
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def get(url: str) -> httpx2.Response:
    return httpx2.get(url, timeout=WAIT_S)


def wait_for(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.01)


def ask_while_stopping(url: str) -> list[tuple[int, str]]:
    """Over new connections: health, and a request."""
    health = get(f"{url}/health")
    answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=WAIT_S)
    return [(response.status_code, response.json()["error"]["message"]) for response in (health, answer)]


def test_a_server_that_stops_says_so_until_it_has() -> None:
    with server_process(*PATIENT) as (process, url):
        found: list[tuple[int, str]] = []

        def terminate() -> None:
            process.send_signal(signal.SIGTERM)
            wait_for_drain(url)
            found.extend(ask_while_stopping(url))

        assert run_clients(url, [(400, True)], terminate) == [(200, 400)]
        assert [status for status, _ in found] == [503, 503]
        assert all("the server is stopping; send the request elsewhere, or again in a while" in message for _, message in found)
        assert process.wait(WAIT_S) == 0
        with pytest.raises(httpx2.ConnectError):
            get(f"{url}/health")


def test_control_a_port_closed_at_once_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrainingServer, "_is_drained", lambda server: True)
    monkeypatch.setattr(serve, "CLOSING_S", 60.0)
    with running_server() as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.drain()
            with pytest.raises(httpx2.TransportError):
                wait_for_drain_to_end(server.url)
            assert [line for line in lines if line][-1] == "data: [DONE]"


def wait_for_drain_to_end(url: str) -> None:
    for _ in range(1000):
        ask_while_stopping(url)


def wait_for_drain(url: str) -> None:
    wait_for(lambda: get(f"{url}/health").status_code == 503, "the server to stop")


def test_ctrl_c_ends_the_line_and_a_second_one_ends_what_runs() -> None:
    with server_process(*PATIENT) as (process, url):

        def interrupt() -> None:
            process.send_signal(signal.SIGINT)
            wait_for_drain(url)
            process.send_signal(signal.SIGINT)

        [(status, message)] = run_clients(url, [(500, True)], interrupt)
        assert status == 200 and "the server is stopping, and this request did not finish in time" in str(message)
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "\nstopping: what runs has 600 s to finish (Ctrl-C ends it now)\n"


def test_what_does_not_finish_in_time_is_told() -> None:
    with server_process("--shutdown-s", "0.2") as (process, url):
        [(status, message)] = run_clients(url, [(500, True)], lambda: process.send_signal(signal.SIGTERM))
        assert status == 200 and "the server is stopping, and this request did not finish in time" in str(message)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--served-model-name", ""], "served_model_name '' is empty; give the name that clients use, or leave it out"),
        (["--served-model-name", " "], "served_model_name ' ' is empty"),
        (["--tool-call-parser", "hermes"], "tool_call_parser 'hermes' is unknown; use one of auto, qwen_json, qwen_xml"),
        (["--state-checkpoint-interval-tokens", "7"], "state_checkpoint_interval_tokens 7 is not a multiple of page_size 16; use for example 16"),
        (["--num-pages", "3", "--max-model-len", "512"], "holds, one of which is never allocated; use 32 or less, or num_pages 33 or more"),
    ],
)
def test_a_wrong_option_is_told_and_nothing_is_served(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", "--port", "0", *options])
    assert result.exit_code == 2 and says in result.stderr and "is served at" not in result.stderr
