"""Many clients at once, clients that leave, and the client that most people use."""

import asyncio
import json
import random
import time
from bisect import bisect
from collections import defaultdict
from typing import Any

import httpx2
import openai
import pytest

from atoll.engine.output import StreamPiece
from atoll.engine.sampling import SamplingParams
from atoll.server.messages import Abort, Command
from atoll.server.ticket import Ticket
from tests.server.running import Running, running_server

NUM_CLIENTS = 200
# Steps that the engine may do until a token that it has made is read, although 200 clients, the server and the engine share one interpreter.
MAX_LAG = 8

Chunk = dict[str, Any]


class Steps:
    """Which step made each token, and when the steps ended."""

    def __init__(self, server: Running) -> None:
        self.ended_s: list[float] = []
        self.made_in: dict[int, list[int]] = defaultdict(list)  # by the request's seed
        self._seeds: dict[int, int] = {}
        self._add, self._step = server.engine.add, server.engine.step
        server.engine.add, server.engine.step = self.add, self.step  # type: ignore[method-assign]

    def add(self, token_ids: list[int], params: SamplingParams, **options: Any) -> int:
        request_id = self._add(token_ids, params, **options)
        self._seeds[request_id] = params.seed if params.seed is not None else -1
        return request_id

    def step(self) -> list[StreamPiece]:
        pieces = self._step()
        for piece in pieces:
            self.made_in[self._seeds[piece.request_id]] += [len(self.ended_s)] * len(piece.token_ids)
        self.ended_s.append(time.monotonic())
        return pieces

    def lag(self, seed: int, read_s: list[float]) -> int:
        """The most steps that ended between the one that made a token of a stream and when its client read it."""
        return max(bisect(self.ended_s, at_s) - made_in - 1 for made_in, at_s in zip(self.made_in[seed], read_s, strict=False))


async def read_stream(http: httpx2.AsyncClient, seed: int, leave_after: int | None) -> tuple[list[Chunk], list[float]]:
    """The chunks of one stream, up to where the client leaves; and when each token was read."""
    body = {
        "prompt": f"Question {seed % 7}: {seed} marbles.",
        "max_tokens": 6 + seed % 9,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    chunks: list[Chunk] = []
    read_s: list[float] = []
    if leave_after == 0:
        # Before anything has come: the request waits, or is being tokenized.
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await asyncio.sleep(0.001 * (seed % 50))
        writer.close()
        await writer.wait_closed()
        return chunks, read_s
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return [*chunks, {}], read_s
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
                read_s += [time.monotonic()] * sum(len(choice["token_ids"]) for choice in chunks[-1]["choices"])
                if len(chunks) == leave_after:
                    return chunks, read_s
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


def run_clients(server: Running, leaves: list[int | None]) -> list[tuple[list[Chunk], list[float]]]:
    async def run() -> list[tuple[list[Chunk], list[float]]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(read_stream(http, seed, leave) for seed, leave in enumerate(leaves)))

    return asyncio.run(run())


@pytest.mark.slow
def test_200_streams_of_which_a_third_are_left() -> None:
    draw = random.Random(0)
    leaves = [draw.choice([0, 1, 3, 9]) if draw.random() < 1 / 3 else None for _ in range(NUM_CLIENTS)]
    # A pool small enough that requests are preempted.
    with running_server({"num_pages": 30, "max_num_seqs": 32, "max_model_len": 128}) as server:
        steps = Steps(server)
        streams = run_clients(server, leaves)
        wait_until_idle(server)
        assert sum(leave is not None for leave in leaves) > 50
        for seed, (leave, (chunks, _)) in enumerate(zip(leaves, streams, strict=True)):
            if leave is None:
                assert chunks[-1] == {} and chunks[-2]["usage"]["completion_tokens"] == 6 + seed % 9
                assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-2]) == 6 + seed % 9
        # No stream stalls, those that are left included.
        lags = [steps.lag(seed, read_s) for seed, (_, read_s) in enumerate(streams) if read_s]
        assert len(lags) > 100 and max(lags) <= MAX_LAG
        text = server.http.get("/metrics").text
        ended = {line.split('"')[1]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("atoll:request_success_total")}
        assert server.engine.num_preemptions > 0
        assert ended["length"] >= leaves.count(None) and ended["abort"] > 0
        assert server.complete("after", max_tokens=3)["choices"]


def test_control_a_stream_that_stalls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    put, held = Ticket.put, dict[Ticket, list[StreamPiece]]()

    def put_late(ticket: Ticket, piece: StreamPiece) -> None:
        held.setdefault(ticket, []).append(piece)
        if piece.finished:
            for one in held.pop(ticket):
                put(ticket, one)

    with running_server() as server:
        steps = Steps(server)
        monkeypatch.setattr(Ticket, "put", put_late)
        streams = run_clients(server, [None] * 9)
        assert steps.lag(8, streams[8][1]) > MAX_LAG


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
