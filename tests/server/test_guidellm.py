"""`guidellm run` against the server: every request is completed, and the counts of tokens that it reads from our usage are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.eval.questions import DEMO_PROBLEMS
from tests.server.programs import needs_clients, run_client
from tests.server.running import Running, demo

pytestmark = [*needs_clients, pytest.mark.slow]

NUM_REQUESTS, OUTPUT_TOKENS = 12, 9
TOKENIZER = ["--tokenizer", f"kind=huggingface_auto,model={DEMO_PROBLEMS.parent}"]


def run_guidellm(server: Running, folder: Path, request_format: str, *options: str) -> dict[str, Any]:
    """The one benchmark of its report."""
    report = folder / "report.json"
    command = ["run", "--backend", f"kind=openai_http,target={server.url},request_format={request_format}", *options]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    run_client("guidellm", *command, "--output", f"kind=json,path={report}", "--disable-console", home=folder)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark


def completed(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    assert len(requests["successful"]) == NUM_REQUESTS
    return requests["successful"]


def test_chat_of_synthetic_text(server: Running, tmp_path: Path) -> None:
    data = f"kind=synthetic_text,prompt_tokens=40,output_tokens={OUTPUT_TOKENS}"
    for request in completed(run_guidellm(server, tmp_path, "/v1/chat/completions", "--data", data, *TOKENIZER)):
        body = json.loads(request["request_args"])["body"]
        assert body["stream"] and body["ignore_eos"] and body["stream_options"]["include_usage"]
        [message] = body["messages"]
        prompt = demo().tokenizer.apply_chat_template([{"role": "user", "content": "".join(part["text"] for part in message["content"])}])
        assert request["input_metrics"]["text_tokens"] == len(prompt) > 40
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS and request["info"]["timings"]["token_iterations"] <= OUTPUT_TOKENS


def test_completions_of_a_file(server: Running, tmp_path: Path) -> None:
    """The shipped problems, to each answer's own end."""
    columns = "kind=generative_column_mapper,column_mappings.text_column=question"
    options = ["--data", f"kind=json_file,path={DEMO_PROBLEMS}", "--data-column-mapper", columns]
    backend = "/v1/completions,max_tokens=64,extras.body.temperature=0"
    for request in completed(run_guidellm(server, tmp_path, backend, *options)):
        body = json.loads(request["request_args"])["body"]
        own = server.complete(body["prompt"], max_tokens=64)
        assert request["output"] == own["choices"][0]["text"]
        assert request["input_metrics"]["text_tokens"] == own["usage"]["prompt_tokens"] == len(demo().tokenizer.encode(body["prompt"]))
        assert request["output_metrics"]["text_tokens"] == own["usage"]["completion_tokens"]
