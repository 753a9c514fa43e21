"""Endpoints beside generation: models, tokenizing and back, metrics, health, the description of the API."""

import json
import re

from atoll.models.tokenizer import Tokenizer
from tests.server.running import Running, demo, running_server


def tokenizer() -> Tokenizer:
    return demo().tokenizer


def test_health_version_and_models(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": "0.0"}
    [model] = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 512)
    assert server.http.get("/v1/models/demo").json() == model


def test_text_to_tokens_and_back(server: Running) -> None:
    text = "Ruth has 48 marbles, £3 — 日本.<|im_end|>"
    found = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == tokenizer().encode(text) and found["count"] == len(found["tokens"])
    assert len(found["token_strs"]) == found["count"] and "<|im_end|>" in found["token_strs"]
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/tokenize", messages=messages).json()["tokens"] == tokenizer().apply_chat_template(messages)
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/tokenize", {"prompt": "\udfff"}),
        ("/detokenize", {"tokens": [1536]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        # httpx2 would refuse half of a surrogate pair itself.
        assert server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"}).status_code == 400


def test_what_a_client_needs_to_spell_prompts_itself(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"], info["eos_token_ids"]) == ("<|im_end|>", 1536, [2, 0])
    assert "add_generation_prompt" in info["chat_template"]


def metric(server: Running, name: str) -> float:
    [value] = re.findall(rf"^atoll:{re.escape(name)} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return float(value)


def test_metrics_count_what_happened() -> None:
    names = {
        "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"},
        "counter": {"prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success"},
        "histogram": {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"},
    }
    with running_server() as server:
        text = server.http.get("/metrics").text
        for kind, wanted in names.items():
            found = {name.removesuffix("_total") for name in re.findall(rf"^# TYPE atoll:(\S+) {kind}$", text, re.MULTILINE)}
            assert wanted <= found
        prompt = list(range(40, 140))
        for _ in range(2):
            server.complete(prompt, n=2, max_tokens=5, ignore_eos=True)
        label = '{model_name="demo"}'
        assert metric(server, f"prompt_tokens_total{label}") == 4 * 100
        assert metric(server, f"generation_tokens_total{label}") == 4 * 5
        assert metric(server, 'request_success_total{finished_reason="length",model_name="demo"}') == 4
        assert metric(server, f"prefix_cache_queries_total{label}") == 4 * 100
        assert metric(server, f"prefix_cache_hits_total{label}") == server.engine.prefix_stats.num_hits > 0
        assert metric(server, f"engine_steps_total{label}") == server.engine.num_steps
        for name, count in (("time_to_first_token", 4), ("inter_token_latency", 4 * 4), ("e2e_request_latency", 4), ("request_queue_time", 4)):
            assert metric(server, f"{name}_seconds_count{label}") == count
        assert metric(server, f"num_requests_running{label}") == metric(server, f"kv_cache_usage_perc{label}") == 0


def test_the_api_describes_itself(server: Running) -> None:
    described = server.http.get("/openapi.json").json()
    paths = described["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/version", "/metrics", "/tokenize", "/detokenize", "/tokenizer_info"} <= set(
        paths
    )
    assert "/reset_prefix_cache" in paths
    assert set(paths["/v1/completions"]["post"]["responses"]) == {"200", "400", "404", "413", "429", "500", "503"}
    assert not [path for path, found in paths.items() for operation in found.values() if "422" in operation["responses"]]
    fields = described["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["model"]["enum"] == ["demo", None] and fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 1535
    for name, path in (("CompletionBody", "/v1/completions"), ("ChatBody", "/v1/chat/completions")):
        [example] = described["components"]["schemas"][name]["examples"]
        assert server.post(path, **example).status_code == 200
