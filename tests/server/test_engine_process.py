"""The engine in a process of its own: messages that cross unchanged, and what clients see when it ends, or never starts."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.config import EngineConfig
from atoll.engine.output import RequestOutput, StreamPiece, TokenLogprobs
from atoll.engine.sampling import SamplingParams
from atoll.errors import ModelError, RequestError, UnavailableError
from atoll.server.engine_process import EngineProcess
from atoll.server.grammars import GrammarConstraint, Grammars
from atoll.server.messages import Add, EngineFacts, EngineStats, Ready, SequenceTask, StepDone, TicketEnded, decode, encode
from tests.server.running import demo, running_server
from tests.server.test_shutdown import PATIENT, WAIT_S, server_process

SCHEMA = {"type": "object", "properties": {"who": {"enum": ["Ruth", "Ben"]}}, "required": ["who"], "additionalProperties": False}


def test_messages_cross_unchanged() -> None:
    logprobs = TokenLogprobs(5, -0.25, ((5, -0.25), (7, float("-inf"))))
    output = RequestOutput(3, None, [1, 2], "é\ud800", [5], "stop", "x", None, [logprobs], [None, logprobs])
    pieces = [(0, StreamPiece(3, 1, "é\ud800", [5], output, (logprobs,), [None, logprobs])), (1, StreamPiece(4, 0, "", [6]))]
    for message in (
        StepDone(1.0, 2.0, [(0, 1)], pieces, EngineStats(2, 1, 0.5)),
        Add(7, [SequenceTask([1, 2], SamplingParams(stop=["a"], logprobs=3), "salt")]),
        TicketEnded(7, [0, 2], RequestError("why"), 1.5, EngineStats()),
    ):
        again = decode(encode(message))
        assert repr(again) == repr(message) and type(again) is type(message)


def test_a_tokenizer_crosses() -> None:
    tokenizer = demo().tokenizer
    again = decode(encode(Ready(EngineFacts(512, 16, 1536), tokenizer))).tokenizer
    messages = [{"role": "user", "content": "Ruth has 48 marbles, £3 — 日本."}]
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert again.eos_token_ids == tokenizer.eos_token_ids and again.special_token_ids == tokenizer.special_token_ids
    assert [again.token_bytes(i) for i in range(1536)] == [tokenizer.token_bytes(i) for i in range(1536)]


def test_a_constraint_crosses_packed_and_allows_the_same() -> None:
    tokenizer = demo().tokenizer
    ours, theirs = Grammars(tokenizer, 1536), Grammars(tokenizer, 1536)
    made = ours.constraint(SCHEMA)
    [task] = decode(encode(Add(0, [SequenceTask([1], SamplingParams(), constraint=made)]))).tasks
    assert not isinstance(task.constraint, GrammarConstraint)
    unpacked = theirs.unpack(task.constraint)
    masks = []
    for token_id in tokenizer.encode('{"who": "Ben"}', add_special_tokens=False):
        assert made.mask() == unpacked.mask()
        masks.append(unpacked.mask())
        assert made.accept(token_id) and unpacked.accept(token_id)
    assert len(set(masks)) > 1 and made.mask() == unpacked.mask()


def test_a_constraint_that_cannot_be_unpacked_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("another version wrote this")

    with running_server() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.link.worker._grammars, "unpack", fail)
            answer = server.post("/v1/completions", prompt="a", response_format={"type": "json_object"})
        assert answer.status_code == 503 and "could not be queued: ValueError: another version wrote this" in answer.json()["error"]["message"]
        assert server.complete("a")["choices"]


def children(pid: int) -> list[int]:
    """Those that run Atoll's engine."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_an_engine_that_is_killed_is_found_out_at_once() -> None:
    with server_process() as (process, url), httpx2.Client(base_url=url, timeout=WAIT_S) as http:
        [engine] = children(process.pid)
        held = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
        body = {"prompt": "Ruth", "temperature": 1, "max_tokens": 60, "response_format": held, "logprobs": 1}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert json.loads(choice["text"])["who"] in ("Ruth", "Ben") and len(choice["logprobs"]["tokens"]) > 3
        assert http.get("/pool").json()["num_generated"] > 3
        assert http.post("/reset_prefix_cache").status_code == 200
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(engine, signal.SIGKILL)
            *_, error, last = lines
        assert last == "data: [DONE]"
        assert "the engine's process has ended with signal SIGKILL" in json.loads(error.removeprefix("data: "))["error"]["message"]
        for answer in (http.get("/health"), http.post("/v1/completions", json={"prompt": "a"}), http.get("/pool")):
            assert answer.status_code == 503 and "has ended with signal SIGKILL" in answer.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 1
        assert process.stderr is not None
        [told] = process.stderr.read().splitlines()
        assert "ERROR atoll.server.engine_loop: the engine's process has ended with signal SIGKILL" in told


def test_a_signal_to_both_processes_is_the_servers_alone() -> None:
    """As a terminal sends Ctrl-C, and a service manager SIGTERM: the running request finishes, and the engine says nothing."""
    with server_process(*PATIENT) as (process, url), httpx2.Client(base_url=url, timeout=WAIT_S) as http:
        [engine] = children(process.pid)
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(engine, signal.SIGINT)
            os.kill(engine, signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            *_, last = lines
        assert last == "data: [DONE]" and process.wait(WAIT_S) == 0
        assert process.stderr is not None and process.stderr.read().strip() == "stopping: what runs has 600 s to finish (Ctrl-C ends it now)"
        assert not is_running(engine)


def test_no_engine_outlives_its_server() -> None:
    with server_process() as (process, _):
        [engine] = children(process.pid)
        process.kill()
        process.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while is_running(engine):
            assert time.monotonic() < deadline, "the engine's process is left over"
            time.sleep(0.02)


def test_what_keeps_an_engine_from_starting_is_told() -> None:
    with EngineProcess("/nowhere", EngineConfig()) as engine, pytest.raises(ModelError, match="'/nowhere' does not exist"):
        engine.wait_until_ready()
    with EngineProcess("demo", EngineConfig()) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="the engine's process has ended with signal SIGKILL"):
            engine.wait_until_ready()
