"""Many clients at once, clients that leave, and the client that most people use."""

import asyncio
import json
import random
import time
from typing import Any

import httpx2
import openai
import pytest

from atoll.server.messages import Abort, Command
from tests.server.running import Running, running_server

NUM_CLIENTS = 200


async def read_stream(http: httpx2.AsyncClient, seed: int, leave_after: int | None) -> list[dict[str, Any]]:
    """The chunks of one stream, up to where the client leaves."""
    body = {
        "prompt": f"Question {seed % 7}: {seed} marbles.",
        "max_tokens": 6 + seed % 9,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    chunks: list[dict[str, Any]] = []
    if leave_after == 0:
        # Before anything has come: the request waits, or is being tokenized.
        with pytest.raises((asyncio.TimeoutError, httpx2.ReadTimeout, httpx2.RemoteProtocolError)):
            await asyncio.wait_for(http.post("/v1/completions", json=body), 0.001 * (seed % 50))
        return chunks
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return [*chunks, {}]
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
                if len(chunks) == leave_after:
                    return chunks
    raise AssertionError("a stream ended without [DONE]")


def wait_until_idle(server: Running, wait_s: float = 30.0) -> None:
    """Nothing is open, and the engine holds no page but those kept for prefixes."""
    deadline = time.monotonic() + wait_s
    while server.service.loop.num_open or server.engine.has_work:
        assert time.monotonic() < deadline, "sequences are still open"
        time.sleep(0.01)
    server.call(lambda engine: engine.check())
    assert server.engine.scheduler.cache.num_available == server.engine.scheduler.ledger.num_usable
    server.call(lambda engine: engine.reset_prefix_cache())
    assert server.engine.scheduler.ledger.num_free == server.engine.scheduler.ledger.num_usable


def test_200_streams_of_which_a_third_are_left() -> None:
    draw = random.Random(0)
    leaves = [draw.choice([0, 1, 3, 9]) if draw.random() < 1 / 3 else None for _ in range(NUM_CLIENTS)]

    async def run(url: str) -> list[list[dict[str, Any]]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(read_stream(http, seed, leave) for seed, leave in enumerate(leaves)))

    # A pool small enough that requests are preempted.
    with running_server({"num_pages": 30, "max_num_seqs": 32, "max_model_len": 128}) as server:
        streams = asyncio.run(run(server.url))
        wait_until_idle(server)
        assert sum(leave is not None for leave in leaves) > 50
        for seed, (leave, chunks) in enumerate(zip(leaves, streams, strict=True)):
            if leave is None:
                assert chunks[-1] == {} and chunks[-2]["usage"]["completion_tokens"] == 6 + seed % 9
                assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-2]) == 6 + seed % 9
        text = server.http.get("/metrics").text
        ended = {line.split('"')[1]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("atoll:request_success_total")}
        assert server.engine.num_preemptions > 0
        assert ended["length"] >= leaves.count(None) and ended["abort"] > 0
        assert server.complete("after", max_tokens=3)["choices"]


def leave(server: Running, streams: bool, **options: Any) -> None:
    """Begin a long request of six sequences, and leave."""
    body = {"prompt": ["a", "b", "c"], "max_tokens": 500, "ignore_eos": True, "n": 2, "stream": streams, **options}
    if not streams:
        with pytest.raises(httpx2.ReadTimeout):
            server.http.post("/v1/completions", json=body, timeout=0.3)
        return
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_takes_its_sequences_along(streams: bool) -> None:
    with running_server({"max_num_seqs": 2}) as server:
        leave(server, streams)
        wait_until_idle(server)
        assert server.engine.num_steps < 400
        assert 'request_success_total{finished_reason="abort",model_name="demo"} 6.0' in server.http.get("/metrics").text


def test_control_without_the_abort_sequences_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server({"max_num_seqs": 2}) as server:
        put, kept = server.link.put, list[Command]()
        monkeypatch.setattr(server.link, "put", lambda command: kept.append(command) if isinstance(command, Abort) else put(command))
        leave(server, streams=True, max_tokens=24)
        with pytest.raises(AssertionError, match="sequences are still open"):
            wait_until_idle(server, wait_s=0.1)
        wait_until_idle(server)
        put(kept.pop())


def test_a_client_that_does_not_read_holds_nobody_up(server: Running) -> None:
    """Its bytes wait in its own queue: another client is answered meanwhile, and it finds all of them later."""
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "n": 8, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        assert server.complete("b", max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_completes_and_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    whole = client.completions.create(model="demo", prompt="Ruth has", max_tokens=12, temperature=0, logprobs=2)
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    pieces = list(client.completions.create(model="demo", prompt="Ruth has", max_tokens=12, temperature=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.role == "assistant" and "demo model" in (answer.choices[0].message.content or "")
    assert answer.choices[0].logprobs is not None and answer.usage is not None
    stream = client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert last.usage == answer.usage or last.usage.completion_tokens == answer.usage.completion_tokens


def test_the_openai_client_understands_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature 9999999"):
        client.completions.create(model="demo", prompt="a", temperature=9999999)
    with running_server(api_key="sesame") as locked, pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="none", max_retries=0).models.list()
