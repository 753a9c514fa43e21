"""SIGTERM to a real server under load: what runs finishes, what waits is told so, and the process ends well."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

OPTIONS = ("--device", "cpu", "--port", "0", "--max-num-seqs", "4", "--max-model-len", "512", "--num-pages", "400")


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
    with httpx2.Client(base_url=url, timeout=60) as http, http.stream("POST", "/v1/completions", json=body) as response:
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
            assert begun[index].wait(60)
    then()
    for thread in threads:
        thread.join(60)
    return results


def test_sigterm_finishes_what_runs_and_refuses_what_waits() -> None:
    with server_process() as (process, url):

        def terminate() -> None:
            waiting = 'num_requests_waiting{model_name="demo"} 5.0'
            for _ in range(500):
                if waiting in httpx2.get(f"{url}/metrics").text:
                    break
            else:
                raise AssertionError("the requests do not wait")
            process.send_signal(signal.SIGTERM)

        jobs = [(150, True), (160, True), (170, True), (180, True), *[(5, False), (6, True), (7, False), (8, True), (9, False)]]
        results = run_clients(url, jobs, terminate)
        assert results[:4] == [(200, 150), (200, 160), (200, 170), (200, 180)]
        for status, message in results[4:]:
            assert status == 503 and "the server is stopping, and this request had not begun" in message
        assert process.wait(30) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_what_does_not_finish_in_time_is_told() -> None:
    with server_process("--shutdown-s", "0.2") as (process, url):
        [(status, message)] = run_clients(url, [(500, True)], lambda: process.send_signal(signal.SIGTERM))
        assert status == 200 and "the server is stopping, and this request did not finish in time" in str(message)
        assert process.wait(30) == 0
