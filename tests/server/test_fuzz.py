"""Bodies of every shape: any answer is right but a 500, and whatever was accepted leaves nothing behind."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.server.protocol import ChatBody, CompletionBody
from tests.server.running import Running

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=12), st.just("demo"), st.just("\ud800")
)
ANY_JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
JSON_TEXTS = st.sampled_from(["{}", "", '{"x": 1}', "[]", "{"])
SCHEMAS = st.none() | st.fixed_dictionaries({}, optional={"type": st.sampled_from(["object", "array", 5]), "properties": ANY_JSON, "required": ANY_JSON})
# Values that are right, and their neighbours.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20)
    | st.lists(st.text(max_size=9), max_size=3)
    | st.lists(st.integers(0, 1540), max_size=9)
    | st.lists(st.lists(st.integers(0, 1540), max_size=9), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot"]), "content": st.text(max_size=9)},
            optional={"tool_calls": st.lists(st.builds(lambda arguments: {"function": {"name": "f", "arguments": arguments}}, JSON_TEXTS), max_size=2)},
        ),
        max_size=3,
    ),
    "tools": st.lists(
        st.builds(lambda **function: {"type": "function", "function": function}, name=st.sampled_from(["f", "g", "f g"]), parameters=SCHEMAS), max_size=2
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": st.booleans(),
    "model": st.just("demo"),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1.2),
    "top_k": st.integers(-2, 2000),
    "min_p": st.floats(0, 1.1),
    "n": st.integers(0, 3),
    "seed": st.integers(-1, 2**64),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 1540), max_size=3),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "presence_penalty": st.floats(-2.1, 2.1),
    "frequency_penalty": st.floats(-2.1, 2.1),
    "repetition_penalty": st.floats(0, 101),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 5),
    "cache_salt": st.text(max_size=2),
    "return_token_ids": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}, {}]),
}


def bodies(fields: list[str], required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Mostly likely values, of which now and then one is anything."""
    optional = [name for name in fields if name in LIKELY and name != required]
    chosen = st.lists(st.sampled_from(optional), max_size=4, unique=True)
    likely = chosen.flatmap(lambda names: st.fixed_dictionaries({name: LIKELY[name] for name in (required, *names)}))
    odd = st.dictionaries(st.sampled_from(fields) | st.text(max_size=5), ANY_JSON, max_size=1)
    # Few tokens, so that many bodies are tried.
    return st.builds(lambda body, other, count: {"max_tokens": count, **body, **other}, likely, odd | st.just({}), st.integers(0, 4))


def answer(server: Running, path: str, body: Any) -> int:
    response = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (body, response.status_code, response.text)
    if response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text and response.text.endswith("data: [DONE]\n\n"), (body, response.text)
    elif response.status_code != 200:
        message = response.json()["error"]["message"]
        # The words of the library that checks bodies, which know neither the field nor a remedy.
        assert message and "Input should" not in message and "Field required" not in message and "which is not taken" not in message, (body, message)
    return response.status_code


def fuzz(server: Running, path: str, strategy: st.SearchStrategy[Any], num_bodies: int) -> dict[int, int]:
    """How many bodies had which status."""
    counts: dict[int, int] = {}

    @settings(max_examples=num_bodies, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(body: Any) -> None:
        status = answer(server, path, body)
        counts[status] = counts.get(status, 0) + 1

    run()
    assert server.service.loop.num_open == 0
    assert server.http.get("/health").status_code == 200
    return counts


def test_completion_bodies(server: Running) -> None:
    counts = fuzz(server, "/v1/completions", bodies(list(CompletionBody.model_fields), "prompt"), 250)
    assert min(counts[200], counts[400]) > 10, counts


def test_chat_bodies(server: Running) -> None:
    counts = fuzz(server, "/v1/chat/completions", bodies(list(ChatBody.model_fields), "messages"), 150)
    assert min(counts[200], counts[400]) > 5, counts


def test_other_bodies(server: Running) -> None:
    for path in ("/tokenize", "/detokenize"):
        fields = st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "model", "add_special_tokens"]), ANY_JSON | LIKELY["prompt"], max_size=2)
        assert fuzz(server, path, fields | ANY_JSON, 60)[400] > 5
