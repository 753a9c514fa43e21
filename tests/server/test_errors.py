"""Whatever is wrong with a request is answered in OpenAI's error JSON with the status that fits, and nothing is left behind."""

import json
import time
from typing import Any

import httpx2
import pytest

from atoll.server.messages import Died
from tests.server.running import Running, running_server


def check_error(response: httpx2.Response, status: int, says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"], error["message"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "prompt is missing; give it"),
        ({"prompt": 5}, 400, "prompt is 5, and must be a string or a list"),
        ({"prompt": ["a", 5]}, 400, "prompt.1 is 5, and must be a string or a list"),
        ({"prompt": [[1, "a"]]}, 400, "prompt.0.1 is 'a', and must be an integer"),
        ({"prompt": []}, 400, "prompt is an empty list"),
        ({"prompt": [[]]}, 400, "the prompt has 0 tokens"),
        ({"prompt": ""}, 400, "the prompt has 0 tokens"),
        ({"prompt": [True]}, 400, "prompt.0 is true, and must be a string, an integer or a list"),
        ({"prompt": [-1]}, 400, "token id -1 is outside the vocabulary's 0 to 1535"),
        ({"prompt": [10**30]}, 400, "outside the vocabulary"),
        ({"prompt": [5] * 512}, 400, "the prompt has 512 tokens, at most 511"),
        ({"prompt": "\ud800"}, 400, "surrogate"),
        ({"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served here; use 'demo'"),
        ({"prompt": "a", "nonsense": 1}, 400, "nonsense is unknown; leave it out"),
        ({"prompt": "a", "n": 17}, 400, "n 17 is above 16"),
        ({"prompt": "a", "n": 0}, 400, "n 0 is below 1"),
        ({"prompt": "a", "n": 10**400}, 400, "... is above 2147483647; lower it"),
        ({"prompt": ["a"] * 60, "n": 16}, 400, "sequences asked for at once: 960, 116 is the limit"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens 0 is below 1"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature -1.0 is neither 0 nor"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature nan"),
        ({"prompt": "a", "temperature": 1e300}, 400, "temperature 1e+300"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p 0"),
        ({"prompt": "a", "top_k": -2}, 400, "top_k -2"),
        ({"prompt": "a", "min_p": 2}, 400, "min_p 2"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs 21"),
        ({"prompt": "a", "logprobs": False}, 400, "logprobs is false, and must be an integer"),
        ({"prompt": "a", "temperature": True}, 400, "temperature is true, and must be a number"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens is '5', and must be an integer"),
        ({"prompt": "a", "echo": 1}, 400, "echo is 1, and must be "),
        ({"prompt": "a", "seed": -1}, 400, "seed -1"),
        ({"prompt": "a", "stop": ""}, 400, "stop ''"),
        ({"prompt": "a", "stop": ["x"] * 65}, 400, "stop has 65 entries, 64 is the limit"),
        ({"prompt": "a", "stop": "x" * 1025}, 400, "stop has 1025 characters, 1024 is the limit"),
        ({"prompt": "a", "stop": "\ud800"}, 400, "stop '\\ud800' holds half of a surrogate pair"),
        ({"prompt": "a", "stop": ["x", "\ud800"]}, 400, "stop.1 '\\ud800' holds half of a surrogate pair"),
        ({"prompt": "a", "cache_salt": "\ud800"}, 400, "cache_salt '\\ud800' holds half of a surrogate pair"),
        ({"prompt": "a", "\ud800": 1}, 400, "holds half of a surrogate pair"),
        ({"prompt": "a", "stop_token_ids": [1536]}, 400, "stop token id 1536"),
        ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty 3.0 is outside -2 to 2"),
        ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty 0.0 is outside 0.01 to 100"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of 3 is not n 1, and all that is generated is sent; leave best_of out, or set n"),
        ({"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of 2 is not n 3"),
        ({"prompt": "a", "best_of": "x"}, 400, "best_of is 'x', and must be an integer"),
        ({"prompt": "a", "max_tokens": 512}, 400, "prompt 1 + max_tokens 512 = 513 tokens, 512 is the limit"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix 'b' is not supported"),
        ({"prompt": "a", "cache_salt": ""}, 400, "cache_salt ''"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options are given and stream is not true"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_wrong_completion_is_told(small: Running, body: dict[str, Any], status: int, says: str, streams: bool) -> None:
    if streams and "stream_options" not in body:
        body = body | {"stream": True}
    response = small.http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    check_error(response, status, says)
    assert small.service.loop.num_open == 0


@pytest.fixture(scope="module")
def small() -> Any:
    with running_server(max_queued=100, max_body_bytes=20_000) as running:
        yield running


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the body is missing; give it"),
        (b"{", "the body is not JSON"),
        (b"\xff", "the body is not UTF-8 at byte 0"),
        (b"[1]", "the body is a list, and must be an object"),
        (b"null", "the body is null, and must be an object"),
        (b"[" * 9000, "the body has too many lists and objects within each other to be read"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt.0.0 is a list, and must be an integer"),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", "a number of more than 4300 digits"),
    ],
)
def test_a_body_that_is_no_object_is_told(small: Running, content: bytes, says: str) -> None:
    check_error(small.http.post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400, says)


def test_a_page_of_another_origin_cannot_make_a_browser_ask(small: Running) -> None:
    """A form sends text/plain without asking first; with the JSON type a browser asks, and no CORS header ever allows it."""
    check_error(
        small.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}),
        400,
        "send the header 'Content-Type: application/json'",
    )
    preflight = small.http.options("/v1/completions", headers={"origin": "http://evil.example", "access-control-request-method": "POST"})
    assert preflight.status_code == 405
    answer = small.http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]


def test_a_large_body_is_refused_before_it_is_read(small: Running) -> None:
    check_error(small.post("/v1/completions", prompt="a" * 20_001), 413, "larger than 20000 bytes")
    # Without a length in the header it is found while reading.
    chunks = (b"x" * 1000 for _ in range(100))
    check_error(small.http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"}), 413, "larger than 20000 bytes")
    assert small.complete("a" * 300)["choices"]


def test_paths_and_methods_that_do_not_exist(small: Running) -> None:
    check_error(small.http.get("/v1/nothing"), 404, "GET /v1/nothing: Not Found")
    check_error(small.http.get("/v1/completions"), 405, "Method Not Allowed")
    check_error(small.http.get("/v1/models/gpt"), 404, "model 'gpt' is not served")


def test_a_full_queue_says_when_to_come_back() -> None:
    with running_server({"max_num_seqs": 1}, max_queued=2) as server:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as one:
            assert one.status_code == 200
            check_error(server.post("/v1/completions", prompt=["a", "b", "c"]), 429, "open sequences: 1, and 3 more would pass 3, the limit; try again in")
            refused = server.post("/v1/completions", prompt=["a", "b", "c"])
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert server.http.get("/health").status_code == 200
        deadline = time.monotonic() + 30
        while server.service.loop.num_open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.complete(["a", "b", "c"])["choices"]


def test_a_key_is_asked_for() -> None:
    with running_server(api_key="sesame") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer SESAME"}, {"authorization": "sesame"}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
                response = server.http.get(path, headers=headers)
                check_error(response, 401, "the API key is missing or wrong")
                assert response.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/health").status_code == 200
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert server.http.get("/v1/models", headers={"authorization": f"{scheme} sesame"}).status_code == 200


def test_an_engine_that_dies_says_so_to_all_who_wait() -> None:
    """And stays dead: a health check that is answered with 200 would keep sending it requests."""
    with running_server({"max_num_seqs": 2}) as server:

        def fail(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        server.complete("a", ignore_eos=True)
        body = {"prompt": ["a", "b", "c"], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as one:
            lines = (line for line in one.iter_lines() if line)
            next(lines)
            server.engine.runner.execute = fail  # type: ignore[method-assign]
            *_, error, last = lines
        assert last == "data: [DONE]"
        assert "the engine has died: RuntimeError: the device is gone; restart the server" in json.loads(error.removeprefix("data: "))["error"]["message"]
        for response in (server.post("/v1/completions", prompt="a"), server.post("/reset_prefix_cache"), server.http.get("/health")):
            check_error(response, 503, "the engine has died")
        assert server.http.get("/v1/models").status_code == 200
        server.service.loop._take(Died("the engine's process has ended with exit code 0"))
        check_error(server.http.get("/health"), 503, "the engine has died: RuntimeError")
        check_metrics_of_the_dead(server.http.get("/metrics").text)


def check_metrics_of_the_dead(text: str) -> None:
    """Two sequences ran, a third waited, and one had ended well."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'atoll:{name}{{model_name="demo"}} 0.0' in text
    for reason, count in (("error", 3), ("length", 1), ("abort", 0)):
        assert f'atoll:request_success_total{{finished_reason="{reason}",model_name="demo"}} {count:.1f}' in text


def test_logits_that_are_no_numbers_end_one_request_alone() -> None:
    with running_server() as server:
        logits = server.engine.runner._model.logits
        server.engine.runner._model.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
        check_error(server.post("/v1/completions", prompt="a"), 500, "hold NaN or Inf")
        del server.engine.runner._model.logits
        assert server.http.get("/health").status_code == 200
        assert server.complete("a")["choices"]
        assert 'request_success_total{finished_reason="error",model_name="demo"} 1.0' in server.http.get("/metrics").text


def test_a_request_that_the_engine_cannot_even_queue_ends_alone() -> None:
    with running_server() as server:
        add = server.engine.add

        def fail(*_: Any, **__: Any) -> int:
            raise TypeError("nobody thought of this")

        server.engine.add = fail  # type: ignore[method-assign]
        check_error(server.post("/v1/completions", prompt=["a", "b"]), 503, "could not be queued: TypeError: nobody thought of this")
        server.engine.add = add  # type: ignore[method-assign]
        assert server.complete("a")["choices"]


def test_the_prefix_cache_is_not_reset_under_a_request() -> None:
    with running_server({"max_num_seqs": 1}) as server:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body):
            check_error(server.post("/reset_prefix_cache"), 409, "requests that wait or run: 1, 0 is the limit")


def test_best_of_may_say_what_n_says(small: Running) -> None:
    for options in ({"best_of": 1}, {"n": 2, "best_of": 2}, {"n": 2, "best_of": None}):
        assert len(small.complete("a", max_tokens=2, temperature=1.0, **options)["choices"]) == (options.get("n") or 1)


def test_an_answer_is_cut_only_where_its_length_is_left_open(small: Running) -> None:
    """At the model's 512 tokens."""
    prompt = [40] * 508
    assert small.complete(prompt, max_tokens=4, ignore_eos=True)["usage"]["total_tokens"] == 512
    check_error(small.post("/v1/completions", prompt=prompt, max_tokens=5), 400, "prompt 508 + max_tokens 5 = 513 tokens, 512 is the limit")
    left_open = small.post("/v1/completions", prompt=prompt, ignore_eos=True).json()
    assert (left_open["choices"][0]["finish_reason"], left_open["usage"]["completion_tokens"]) == ("length", 4)
    messages = [{"role": "user", "content": "a"}]
    for name in ("max_tokens", "max_completion_tokens"):
        check_error(small.post("/v1/chat/completions", messages=messages, **{name: 510}), 400, "512 is the limit; lower max_tokens, or leave it out")
    # The newer name counts where both are given.
    assert small.post("/v1/chat/completions", messages=messages, max_tokens=510, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_a_long_name_does_not_fill_the_answer(small: Running) -> None:
    response = small.post("/v1/completions", prompt="a", **{"x" * 5000: 1})
    check_error(response, 400, "x... is unknown; leave it out")
    assert len(response.text) < 300
