"""`curl` against the server: an answer, a stream as it comes, and what is refused; the documentation's own commands are run with its pages."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.programs import CURL, needs_curl
from tests.server.running import Running, running_server

pytestmark = needs_curl

JSON = ("-H", "Content-Type: application/json")
KEY = ("-H", "Authorization: Bearer sesame")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running_server(api_key="sesame", max_body_bytes=2000) as running:
        yield running


def curl(server: Running, path: str, *arguments: str, body: Any = None) -> tuple[int, str]:
    """Status and text."""
    assert CURL is not None
    data = () if body is None else (*JSON, "--data", json.dumps(body))
    command = [CURL, "--silent", "--show-error", "--no-buffer", "--max-time", "60", "--write-out", "\n%{http_code}", *arguments, *data, server.url + path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def test_completions(keyed: Running) -> None:
    body = {"prompt": "Question: What is 6 * 7?\nAnswer:", "max_tokens": 8, "temperature": 0}
    status, text = curl(keyed, "/v1/completions", *KEY, body=body)
    assert status == 200
    answer = json.loads(text)
    own = keyed.http.post("/v1/completions", json=body, headers={"authorization": "Bearer sesame"}).json()
    assert answer["choices"] == own["choices"] and answer["choices"][0]["text"]


def test_a_chat_stream(keyed: Running) -> None:
    body = {"messages": [{"role": "user", "content": "What is 6 * 7?"}], "max_tokens": 12, "temperature": 0, "stream": True}
    status, text = curl(keyed, "/v1/chat/completions", *KEY, body=body)
    assert status == 200
    *events, done = [line for line in text.splitlines() if line]
    assert done == "data: [DONE]" and len(events) > 3
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    _, whole = curl(keyed, "/v1/chat/completions", *KEY, body=body | {"stream": False})
    assert "".join(delta.get("content", "") for delta in deltas) == json.loads(whole)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("arguments", "body", "status", "says"),
    [
        ((), {"prompt": "a"}, 401, "the API key is missing or wrong"),
        (("-H", "Authorization: Bearer sesam"), {"prompt": "a"}, 401, "the API key is missing or wrong"),
        (KEY, {"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served here"),
        (KEY, {"prompt": "a", "temperature": -1}, 400, "temperature -1.0"),
        (KEY, {"prompt": "a" * 2000}, 413, "larger than 2000 bytes"),
        ((*KEY, *JSON, "--data", '{"prompt": "a"'), None, 400, "the body is not JSON"),
        # What --data sends by itself is a form.
        ((*KEY, "--data", '{"prompt": "a"}'), None, 400, "send the header 'Content-Type: application/json'"),
    ],
)
def test_refusals(keyed: Running, arguments: tuple[str, ...], body: Any, status: int, says: str) -> None:
    found, text = curl(keyed, "/v1/completions", *arguments, body=body)
    assert found == status and says in json.loads(text)["error"]["message"]


def test_a_body_over_the_limit_without_its_length_is_refused(keyed: Running) -> None:
    command = ("-H", "Transfer-Encoding: chunked")
    status, text = curl(keyed, "/v1/completions", *KEY, *command, body={"prompt": "a" * 100_000})
    assert status == 413 and "larger than 2000 bytes" in json.loads(text)["error"]["message"]
