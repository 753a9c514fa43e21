"""Chat completions: templates, log probabilities, deltas, content parts, and what is refused."""

import math

import pytest

from atoll import LLM, SamplingParams
from tests.server.running import Running, demo
from tests.server.test_completions import stream

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
URL = "/v1/chat/completions"


def test_the_answer_is_the_offline_one(server: Running) -> None:
    [wanted] = LLM.from_loaded(demo(), kv_format="fp32", max_model_len=512).chat(MESSAGES, SamplingParams(temperature=0, max_tokens=512))
    answer = server.post(URL, model="demo", messages=MESSAGES, temperature=0).json()
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text} and choice["finish_reason"] == wanted.finish_reason == "stop"
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("chat.completion", len(wanted.token_ids))
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"][:2]}, {"type": "text", "text": m["content"][2:]}]} for m in MESSAGES]
    assert server.post(URL, messages=parts, temperature=0).json()["choices"] == answer["choices"]


def test_deltas_joined_are_the_answer(server: Running) -> None:
    whole = server.post(URL, messages=MESSAGES, temperature=0, max_completion_tokens=20, n=2).json()
    chunks = stream(server, URL, messages=MESSAGES, max_tokens=20, n=2, stream_options={"include_usage": True})
    assert {key: chunks[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")} == {
        key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    }
    for wanted in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == wanted["index"]]
        assert own[0]["delta"]["role"] == "assistant" and all("role" not in choice["delta"] for choice in own[1:])
        assert "".join(choice["delta"].get("content", "") for choice in own) == wanted["message"]["content"]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [wanted["finish_reason"]]


def test_log_probabilities_and_their_alternatives(server: Running) -> None:
    options = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 4}
    [choice] = server.post(URL, temperature=0, **options).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert sum(math.exp(value) for value in values) <= 1 + 1e-5
    streamed = [entry for chunk in stream(server, URL, **options) for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages has 0 entries, 1 is the least"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "chat template refuses the conversation: role must be"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing; give text, or tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type is 'image_url', and must be 'text'$",
        ),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function is missing; give it"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type is 'xml', and must be one of 'text', 'json_object', 'json_schema'"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens or ignore_eos is given beside a response_format"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "schema cannot be compiled: Type",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs 2 is given and logprobs is not true"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "logprobs 21 is above 20"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens 0 is below 1"),
    ],
)
def test_what_cannot_be_done_is_said(server: Running, body: dict, message: str) -> None:
    response = server.post(URL, **body)
    assert response.status_code == 400
    with pytest.raises(ValueError, match=message):
        raise ValueError(response.json()["error"]["message"])


def test_harmless_fields_are_taken(server: Running) -> None:
    response = server.post(URL, messages=MESSAGES, max_tokens=1, tools=[], response_format={"type": "text"}, user="x", metadata={"a": "b"}, store=False)
    assert response.status_code == 200
