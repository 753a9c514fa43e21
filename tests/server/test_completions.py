"""Completions over HTTP are those of the offline engine: every kind of prompt, choices, stops, log probabilities, echo, usage, streams."""

import json
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from tests.server.running import Running, demo

TEXT = "Question: Ruth has 48 marbles. She gives half of them to Ben. How many marbles does Ruth have now?\nAnswer:"


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM.from_loaded(demo(), kv_format="fp32", max_num_seqs=4, max_model_len=512)


def stream(server: Running, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end by [DONE]."""
    with server.http.stream("POST", path, json={"temperature": 0, "max_tokens": 24, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_every_kind_of_prompt_gives_the_offline_answer(server: Running, offline: LLM) -> None:
    other = "Question: Ivan buys 3 notebooks."
    ids, other_ids = demo().tokenizer.encode(TEXT), demo().tokenizer.encode(other)
    params = SamplingParams(temperature=0, max_tokens=24)
    wanted = [output.text for output in offline.generate([TEXT, other], params)]
    assert wanted[0] != wanted[1]
    for prompt in (TEXT, ids):
        assert [choice["text"] for choice in server.complete(prompt, max_tokens=24)["choices"]] == wanted[:1]
    for prompts in ([TEXT, other], [ids, other_ids]):
        choices = server.complete(prompts, max_tokens=24)["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(wanted))


def test_choices_differ_by_seed_and_repeat_with_it(server: Running, offline: LLM) -> None:
    answers = [server.complete(["Ruth has", "Ben has"], n=3, temperature=1.0, seed=7, max_tokens=12, model="demo") for _ in range(2)]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 6
    [second] = offline.generate("Ruth has", SamplingParams(temperature=1.0, seed=8, max_tokens=12))
    assert texts[0][1] == second.text
    # A prompt counts once, however many sequences continue it.
    assert answers[0]["usage"]["prompt_tokens"] == sum(len(demo().tokenizer.encode(text)) for text in ("Ruth has", "Ben has"))


@pytest.mark.parametrize(
    "options",
    [
        {"stop": "48"},
        {"stop": ["zzz", "="], "min_tokens": 9},
        {"stop_token_ids": [22]},
        {"ignore_eos": True, "max_tokens": 60},
        {"temperature": 0.9, "top_k": 5, "seed": 1},
        {"temperature": 0.9, "top_p": 0.5, "min_p": 0.1, "seed": 2},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 4.0},
    ],
)
def test_sampling_options_reach_the_engine(server: Running, offline: LLM, options: dict[str, Any]) -> None:
    params = {"temperature": 0, "max_tokens": 24, **options}
    [wanted] = offline.generate(TEXT, SamplingParams(**params))
    [plain] = offline.generate(TEXT, SamplingParams(temperature=0, max_tokens=24))
    assert wanted.token_ids != plain.token_ids or wanted.stop_reason is not None, "the option changes nothing here, so the test sees nothing"
    answer = server.complete(TEXT, return_token_ids=True, **params)
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (
        wanted.text,
        wanted.token_ids,
        wanted.finish_reason,
        wanted.stop_reason,
    )
    assert choice["prompt_token_ids"] == wanted.prompt_token_ids
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(wanted.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@torch.inference_mode()
def test_echo_scores_the_prompt_as_loglikelihood_tasks_ask_for_it(server: Running, offline: LLM) -> None:
    """Token ids, echo, logprobs 1, max_tokens 1: one entry per token of the prompt, the first null, and one for the token generated."""
    prompts = [demo().tokenizer.encode(TEXT), demo().tokenizer.encode("Ruth has 12 apples."), [40]]
    choices = server.complete(prompts, echo=True, logprobs=1, max_tokens=1)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        # Scored one by one by another way: a prompt cut after each token, and the likeliest of the next.
        found = choice["logprobs"]
        assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
            ("text_offset", "token_logprobs", "tokens", "top_logprobs"), len(prompt) + 1
        )
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert "".join(found["tokens"]) == choice["text"]
        assert [choice["text"][at:][:1] for at in found["text_offset"]] == [token[:1] for token in found["tokens"]]
        for length in range(1, len(prompt), 7):
            [cut] = offline.generate([prompt[:length]], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
            assert cut.logprobs is not None
            [(best, logprob)] = cut.logprobs[0].top
            assert found["top_logprobs"][length][demo().tokenizer.decode([best], skip_special_tokens=False)] == pytest.approx(logprob, abs=1e-4)
            if best == prompt[length]:
                assert found["token_logprobs"][length] == pytest.approx(logprob, abs=1e-4)
            else:
                assert found["token_logprobs"][length] < logprob


def test_echo_alone_generates_nothing(server: Running) -> None:
    answer = server.complete("Ruth has", echo=True, max_tokens=0, logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == "Ruth has" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert server.complete(demo().tokenizer.encode("Ruth has"), echo=True)["choices"][0]["text"].startswith("Ruth has")


def test_log_probabilities_of_the_output(server: Running, offline: LLM) -> None:
    [wanted] = offline.generate(TEXT, SamplingParams(temperature=0, max_tokens=8, logprobs=3))
    found = server.complete(TEXT, logprobs=3)["choices"][0]["logprobs"]
    assert wanted.logprobs is not None
    assert found["token_logprobs"] == pytest.approx([entry.logprob for entry in wanted.logprobs], abs=1e-4)
    assert [len(top) for top in found["top_logprobs"]] == [3] * 8
    assert server.complete(TEXT)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("options", [{}, {"stop": "48"}, {"echo": True, "logprobs": 2}, {"n": 2, "temperature": 1.0, "seed": 3}, {"return_token_ids": True}])
def test_a_stream_joined_is_the_whole(server: Running, options: dict[str, Any]) -> None:
    whole = server.complete([TEXT, "Ben has"], max_tokens=24, **options)
    chunks = stream(server, prompt=[TEXT, "Ben has"], stream_options={"include_usage": True}, **options)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert {k: v for k, v in chunks[-1]["usage"].items() if "details" not in k} == {k: v for k, v in whole["usage"].items() if "details" not in k}
    for wanted in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == wanted["index"]]
        assert len(own) > 1
        assert "".join(choice["text"] for choice in own) == wanted["text"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [wanted["finish_reason"]]
        if wanted["logprobs"] is not None:
            for name, values in wanted["logprobs"].items():
                joined = [value for choice in own for value in choice["logprobs"][name]]
                assert joined == (pytest.approx(values, abs=1e-4) if name == "token_logprobs" else values) or name == "top_logprobs"
        if "return_token_ids" in options:
            assert [token for choice in own for token in choice["token_ids"]] == wanted["token_ids"]


def test_usage_in_every_chunk(server: Running) -> None:
    chunks = stream(server, prompt=TEXT, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 24
    assert "usage" not in stream(server, prompt=TEXT)[0]


def test_cached_tokens_are_those_really_read(server: Running) -> None:
    prompt = demo().tokenizer.encode(TEXT * 3)

    def cached(**options: Any) -> int:
        return server.complete(prompt, cache_salt="of this test", **options)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert 0 < cached() < len(prompt)
    # All of a scored prompt is computed.
    assert cached(echo=True, logprobs=1) == 0
    assert server.complete(prompt, cache_salt="another")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
