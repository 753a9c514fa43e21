"""Answers held to JSON or a schema: always parseable, through streams, several choices, preemption and other requests beside them."""

import asyncio
import json
import random
import sys
from typing import Any

import openai
import pytest
import torch

from atoll.engine.sampler import sample
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask
from atoll.errors import RequestError
from atoll.server import grammars
from atoll.server.grammars import GrammarConstraint, Grammars
from tests.server.running import Running, demo
from tests.server.walks import random_walk

SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Ruth", "Ben"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}, "sold": {"type": "boolean"}},
    "required": ["who", "count", "sold"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "marbles", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Ruth has 48 marbles."}]


def check_answer(text: str) -> None:
    value = json.loads(text)
    assert value["who"] in ("Ruth", "Ben") and 0 <= value["count"] <= 99 and isinstance(value["sold"], bool) and len(value) == 3


def test_an_answer_fits_its_schema(server: Running) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, n=6, temperature=1.0, seed=1, max_tokens=200, response_format=FORMAT).json()
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        check_answer(choice["message"]["content"])


def test_without_it_the_model_says_no_json(server: Running) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=40).json()
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer["choices"][0]["message"]["content"])


def test_an_object_of_any_kind(server: Running) -> None:
    """A model that knows no JSON may never close it; what came is the beginning of an object, and a whole one where it stopped."""
    for seed in range(3):
        choice = server.complete("{", temperature=1.0, seed=seed, max_tokens=60, response_format={"type": "json_object"})["choices"][0]
        assert choice["text"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_a_constraint_holds_one_row_alone(server: Running) -> None:
    plain: dict[str, Any] = {"prompt": "Ruth has", "temperature": 0, "max_tokens": 12}
    alone = server.complete(**plain)["choices"]
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def run() -> tuple[Any, Any]:
        held = client.completions.create(model="demo", prompt="Ruth has", max_tokens=200, extra_body={"response_format": FORMAT})
        free = client.completions.create(model="demo", prompt="Ruth has", temperature=0, max_tokens=12)
        result = await asyncio.gather(held, free)
        await client.close()
        return result

    held, free = asyncio.run(run())
    check_answer(held.choices[0].text)
    assert free.choices[0].text == alone[0]["text"]


def test_a_mask_is_the_vocabulary_s_bits() -> None:
    constraint: GrammarConstraint = Grammars(demo().tokenizer, 1536).constraint(SCHEMA)
    bits = [8 * index + bit for index, byte in enumerate(constraint.mask()) for bit in range(8) if byte >> bit & 1]
    texts = {demo().tokenizer.decode([token_id], skip_special_tokens=False) for token_id in bits}
    assert "{" in texts and all(text.lstrip().startswith("{") or not text.strip() for text in texts)
    # The sampler reads the same bits: the likeliest token is taken only if it is allowed.
    logits = torch.zeros(2, 1536)
    logits[:, 7], logits[:, bits[0]] = 9.0, 5.0
    params = SamplingParams(temperature=0)
    held, free = sample(logits, [SampleTask(params, 0, 0, allowed=constraint.mask()), SampleTask(params, 0, 0)])
    assert (held.token_id, free.token_id) == (bits[0], 7)
    assert 7 not in bits and not constraint.accept(7) and constraint.accept(bits[0])


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"enum": ["x" * 70_000]}, "characters, 65536 is the limit"),
        ({"$ref": "#"}, "cannot be compiled: Circular"),
        ({"type": "string", "pattern": "((("}, "cannot be compiled: Regex parsing error"),
        (False, "cannot accept any value"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_told(schema: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Grammars(demo().tokenizer, 1536).constraint(schema)


def test_a_schema_that_would_take_minutes_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="the JSON schema is 902 levels deep, 64 is the limit"):
        Grammars(demo().tokenizer, 1536).constraint(schema)


def test_a_server_without_xgrammar_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"by response_format or tools, needs xgrammar, which this server lacks; install atoll\[structured\]"):
        Grammars(demo().tokenizer, 1536).constraint(None)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 9}]}, "has an allOf of 2, 1 is the limit; merge them"),
        ({"type": "integer", "not": {"enum": [3]}}, "has 'not', to which no answer is held; leave it out"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties 'a' has 'uniqueItems'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "has 'oneOf', to which no answer is held; use anyOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookaround"),
        ({"type": "string", "format": "nonsense"}, "has the format 'nonsense'"),
        ({"enum": ["\ud83d"]}, "half of a surrogate pair"),
        ({"type": "string", "format": []}, "has the format \\[\\]"),
        ({"type": "string", "pattern": '"'}, "a quote, a backslash or a control character to match"),
        ({"type": "string", "pattern": r"\s\W\t"}, "a quote, a backslash or a control character to match"),
        ({"type": "string", "pattern": "[a-z]+", "maxLength": 2}, "has 'maxLength' beside a pattern or format"),
    ],
)
def test_a_schema_that_no_answer_would_be_held_to_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Grammars(demo().tokenizer, 1536).constraint(schema)


def test_property_names_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer"}, "oneOf": {"type": "string", "format": "date"}}, "required": ["not"]}
    assert Grammars(demo().tokenizer, 1536).constraint(schema).mask()


def check_strings(num_walks: int) -> None:
    """Whatever a grammar lets through is JSON: random walks over what may come next."""
    compiler, draw = Grammars(demo().tokenizer, 1536), random.Random(0)
    schema = {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"type": "string", "pattern": ".{3}"}]}, "maxItems": 3}
    for _ in range(num_walks):
        assert isinstance(json.loads(demo().tokenizer.decode(random_walk(compiler.constraint(schema), draw))), list)


def test_a_string_of_limited_length_holds_no_control_character() -> None:
    check_strings(60)


def test_control_xgrammar_alone_lets_one_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_STRING_CHARACTER", grammars._BOUNDED_CHARACTER)
    with pytest.raises(json.JSONDecodeError, match="Invalid control character"):
        check_strings(60)
