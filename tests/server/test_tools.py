"""Tools over HTTP: what the model is told of them, calls that must be made or may be made, whole and streamed, and their results sent back."""

import json
from typing import Any

import openai
import pytest

from atoll.server.chat import ChatReply
from atoll.server.tool_formats import TOOL_FORMATS
from tests.server.running import Running, demo, running_server
from tests.server.test_completions import stream

URL = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
# Short, as the demo model's vocabulary is small and each token takes its time.
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["x"], "additionalProperties": False}
ROLL: dict[str, Any] = {"type": "function", "function": {"name": "roll", "description": "Roll x dice", "parameters": PARAMETERS}}
FLIP: dict[str, Any] = {"type": "function", "function": {"name": "flip"}}
TOOLS: list[Any] = [ROLL, FLIP]
NAMED: Any = {"type": "function", "function": {"name": "roll"}}
# How Qwen's templates tell of tools, calls and results, in short.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}"
    "{% if message.role == 'tool' %}{{ '<tool_response>\n' + message.content + '\n</tool_response>' }}{% else %}{{ message.content }}{% endif %}"
    "{% for tool_call in message.tool_calls or [] %}{% set call = tool_call.function %}STYLE{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STYLES = {
    "qwen_json": """{{ '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}""",
    "qwen_xml": "{{ '<tool_call>\n<function=' + call.name + '>\n' }}{% for name, value in call.arguments | items %}"
    "{{ '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}",
}
SPELLED = {
    "qwen_json": '<tool_call>\n{"name": "roll", "arguments": {"x": 3}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=roll>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>",
}
CALL = ("roll", {"x": 3})


@pytest.fixture(scope="module", params=sorted(TOOL_FORMATS))
def qwen_server(request: pytest.FixtureRequest) -> Any:
    with running_server(tool_call_parser=request.param) as running:
        yield running


@pytest.fixture
def qwen(qwen_server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server whose model has a chat template like Qwen's."""
    monkeypatch.setattr(demo().tokenizer, "chat_template", TEMPLATE.replace("STYLE", STYLES[qwen_server.service.tool_format.name]))
    return qwen_server


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a free model say a text."""

    def set_text(text: str) -> None:
        monkeypatch.setattr(ChatReply, "constraint", lambda reply: reply.service.grammars.tag_constraint({"type": "const_string", "value": text}))

    return set_text


def ask(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post(URL, **{"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "temperature": 1.0, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message.get("tool_calls", ()))
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]


def check_call(name: str, arguments: dict[str, Any]) -> None:
    assert (name, arguments) == ("flip", {}) or (name == "roll" and set(arguments) == {"x"} and type(arguments["x"]) is int and 1 <= arguments["x"] <= 9)


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, and why it ended. A call begins by its id, type and name, and grows by its arguments alone."""
    choices = [chunk["choices"][0] for chunk in chunks]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert set(call) == {"index", "id", "type", "function"} and call["function"]["arguments"] == "" and call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} and call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    assert choices[0]["delta"]["role"] == "assistant" and [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return message, choices[-1]["finish_reason"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_made_is_made(qwen: Running, choice: Any) -> None:
    """Even by a model that has never seen one."""
    body = {"tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    for one in ask(qwen, **body)["choices"]:
        assert (one["finish_reason"], one["message"]["content"]) == ("tool_calls", None)
        [(name, arguments)] = calls_of(one["message"])
        check_call(name, arguments)
        assert choice == "required" or name == "roll"
    message, reason = joined(stream(qwen, URL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200))
    assert reason == "tool_calls" and message["content"] == ""
    [(name, arguments)] = calls_of(message)
    check_call(name, arguments)


def test_control_without_the_grammar_the_demo_model_makes_no_call(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatReply, "constraint", lambda reply: None)
    [one] = ask(server, tool_choice="required", temperature=0, max_tokens=40)["choices"]
    assert "tool_calls" not in one["message"] and one["message"]["content"].startswith("Hello!") and one["finish_reason"] == "stop"


def test_several_calls_until_the_tokens_end(qwen: Running) -> None:
    [one] = ask(qwen, tool_choice="required", max_tokens=100, tools=[FLIP])["choices"]
    calls = one["message"]["tool_calls"]
    assert one["finish_reason"] in ("length", "tool_calls") and one["message"]["content"] is None
    assert len({call["id"] for call in calls}) == len(calls) > 1
    # A name without its arguments is what tokens may end in.
    assert {(call["function"]["name"], call["function"]["arguments"]) for call in calls} <= {("flip", "{}"), ("flip", "{"), ("flip", "")}


def test_a_free_model_calls_or_does_not(qwen: Running, says: Any) -> None:
    call = SPELLED[qwen.service.tool_format.name]
    unknown = call.replace("roll", "wave")
    for text, content, calls in ((f"Let me see.\n{call}\n{call}", "Let me see.", [CALL, CALL]), (unknown, unknown, [])):
        says(text)
        [one] = ask(qwen)["choices"]
        assert (one["message"]["content"], calls_of(one["message"]), one["finish_reason"]) == (content, calls, "tool_calls" if calls else "stop")
        message, reason = joined(stream(qwen, URL, messages=MESSAGES, tools=TOOLS, max_tokens=200))
        assert (message["content"], calls_of(message), reason) == (content, calls, one["finish_reason"])


def test_a_free_model_s_calls_are_limited_left_alone_or_cut(qwen: Running, says: Any) -> None:
    call = SPELLED[qwen.service.tool_format.name]
    says(f"{call}\n{call}")
    [one] = ask(qwen, parallel_tool_calls=False)["choices"]
    assert calls_of(one["message"]) == [CALL] and one["message"]["content"] is None
    [one] = ask(qwen, tool_choice="none")["choices"]
    assert one["message"] == {"role": "assistant", "content": f"{call}\n{call}"} and one["finish_reason"] == "stop"
    [one] = ask(qwen, max_tokens=15)["choices"]
    assert one["finish_reason"] == "length" and call.startswith(one["message"]["content"]) and "tool_calls" not in one["message"]


def test_the_template_is_told_of_tools_calls_and_results(qwen: Running) -> None:
    def prompt(messages: Any, **body: Any) -> str:
        [one] = ask(qwen, messages=messages, max_tokens=1, return_token_ids=True, **body)["choices"]
        return demo().tokenizer.decode(one["prompt_token_ids"], skip_special_tokens=False)

    told = (
        '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "roll", "description": "Roll x dice", "parameters": '
        f'{json.dumps(PARAMETERS)}}}}}\n{{"type": "function", "function": {{"name": "flip"}}}}\n</tools><|im_end|>\n'
    )
    asked, begin = "<|im_start|>user\nhello<|im_end|>\n", "<|im_start|>assistant\n"
    assert prompt(MESSAGES) == told + asked + begin
    # What strict asks for is not the model's business; a tool that may not be called is none of it either.
    strict = {"type": "function", "function": {**ROLL["function"], "strict": False}}
    assert prompt(MESSAGES, tools=[strict, FLIP]) == told + asked + begin
    assert prompt(MESSAGES, tool_choice="none") == prompt(MESSAGES, tools=[]) == asked + begin
    called = {"id": "call_1", "type": "function", "function": {"name": "roll", "arguments": '{"x":3}'}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [called]}, {"role": "tool", "tool_call_id": "call_1", "content": "five"}]
    answered = f"{begin}{SPELLED[qwen.service.tool_format.name]}<|im_end|>\n<|im_start|>user\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
    assert prompt(history) == told + asked + answered + begin
    tokens = qwen.post("/tokenize", messages=history).json()["tokens"]
    assert demo().tokenizer.decode(tokens, skip_special_tokens=False) == asked + answered + begin


def test_a_strict_tool_holds_the_call_of_a_model_that_is_free_to_call(qwen: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text may be anything, and what begins as a call becomes one."""
    strict = {"type": "function", "function": {**ROLL["function"], "strict": True}}
    [free] = ask(qwen, tools=[strict, FLIP], temperature=0)["choices"]
    [plain] = ask(qwen, temperature=0)["choices"]
    assert free["message"] == plain["message"] and "tool_calls" not in free["message"]
    held: list[dict[str, Any]] = []
    tag_constraint = qwen.service.grammars.tag_constraint

    def begun(form: dict[str, Any]) -> Any:
        held.append(form)
        return tag_constraint({"type": "sequence", "elements": [{"type": "const_string", "value": "Well."}, form["tags"][0]]})

    monkeypatch.setattr(qwen.service.grammars, "tag_constraint", begun)
    message, reason = joined(stream(qwen, URL, messages=MESSAGES, tools=[strict], max_tokens=200))
    assert held[0]["type"] == "triggered_tags" and held[0]["triggers"] == ["<tool_call>"]
    assert message["content"] == "Well." and reason == "tool_calls"
    check_call(*calls_of(message)[0])


def test_an_answer_of_a_schema_or_a_call(qwen: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}}, "required": ["sky"]}}}
    kinds = set()
    strict = {"type": "function", "function": {"name": "flip", "strict": True}}
    for one in ask(qwen, response_format=form, parallel_tool_calls=False, tools=[strict], n=6)["choices"]:
        if one["finish_reason"] == "tool_calls":
            assert calls_of(one["message"]) == [("flip", {})]
        else:
            assert json.loads(one["message"]["content"])["sky"] in ("clear", "grey")
        kinds.add(one["finish_reason"])
    assert kinds == {"stop", "tool_calls"}


def test_the_openai_client_calls_and_sends_the_result_back(server: Running) -> None:
    """With the demo model and its own template, which tells it of no tool."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for choice in ("required", NAMED):
        messages = list(MESSAGES)
        whole = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.tool_calls
        [call] = whole.choices[0].message.tool_calls
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        check_call(call.function.name, json.loads(call.function.arguments))
        with client.chat.completions.stream(
            model="demo", messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200, temperature=0
        ) as events:
            kinds = [event.type for event in events]
            streamed = events.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls and not streamed.message.content
        check_call(streamed.message.tool_calls[0].function.name, json.loads(streamed.message.tool_calls[0].function.arguments))
        assert kinds.count("tool_calls.function.arguments.delta") > 1 and "tool_calls.function.arguments.done" in kinds
        messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "five"}]
        answer = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, temperature=0, max_tokens=60)
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
        # As some clients send a message back: every field that a message may have.
        messages[-2] = whole.choices[0].message.model_dump()
        assert client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, temperature=0, max_tokens=60).choices == answer.choices


def test_the_demo_model_spells_calls_and_results_as_qwen_does() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call, call]}, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "Five."}]
    text = demo().tokenizer.decode(demo().tokenizer.apply_chat_template(messages, tools=[ROLL], add_generation_prompt=False), skip_special_tokens=False)
    spelled = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert text == (
        f"<|im_start|>assistant\n{spelled}\n{spelled}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nFive.<|im_end|>\n"
    )


def test_every_chunk_has_a_delta(server: Running) -> None:
    chunks = stream(server, URL, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=200, return_token_ids=True, logprobs=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all("delta" in choice for choice in choices)
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert len(token_ids) == sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"])


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def call(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": function(name="")}, "tools.0.function.name '' is not 1 to 64 of"),
        ({"tools": function(name="a b")}, "tools.0.function.name 'a b' is not 1 to 64 of"),
        ({"tools": function(name="x" * 65)}, "is not 1 to 64 of"),
        ({"tools": [*TOOLS, ROLL]}, "tools.2.function.name 'roll' is the name of an earlier tool"),
        ({"tools": function(name="f") * 129}, "tools"),
        ({"tools": function(parameters={"type": "array"})}, "tools.0.function.parameters.type 'array' is not 'object'"),
        ({"tools": function(parameters=nested(100))}, "levels deep, 64 is the limit"),
        ({"tools": function(parameters={"description": "x" * 70_000})}, "characters, 65536 is the limit"),
        (
            {"tools": [{"type": "function", "function": {"name": f"f{at}", "description": "x" * 60_000}} for at in range(5)]},
            "characters together, 262144 is the limit; offer fewer",
        ),
        ({"tools": function(description="\ud83d")}, "half of a surrogate pair"),
        ({"tools": function(colour="red")}, "colour"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tides"}}},
            "tool_choice.function.name 'tides' is none of the tools; use one of",
        ),
        ({"tool_choice": "required"}, "tool_choice asks for a call, and tools is empty"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice asks for a call, and tools is empty"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format for an answer of another form"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 5}, "min_tokens or ignore_eos is given beside a tool_choice"),
        (
            {"tools": function(parameters={"properties": {"x": {"not": {}}}}), "tool_choice": "required"},
            "tools.0.function.parameters, properties 'x' has 'not', to which no answer is held",
        ),
        (
            {"tools": function(parameters={"properties": {"x": {"type": "string", "pattern": "((("}}}), "tool_choice": "required"},
            "tools.0.function.parameters cannot be compiled: ",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content is missing; give text, or tool_calls"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": call("{}")}]}, "messages.0.tool_calls are given in a message of role 'user'"),
        ({"messages": [{"role": "assistant", "tool_calls": call("[1]")}]}, "messages.0.tool_calls.0.function.arguments '[1]' is not a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": call("{")}]}, "messages.0.tool_calls.0.function.arguments '{' is not a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": call("[" * 100_000)}]}, "is not a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": call('{"a":' * 70 + "1" + "}" * 70)}]}, "levels deep, 64 is the limit"),
        ({"messages": [{"role": "assistant", "tool_calls": call('{"a": "\\ud83d"}')}]}, "half of a surrogate pair"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "\ud83d", "function": {"name": "f", "arguments": ""}}]}]}, "half of a surrogate pair"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {}}]}, "function_call"),
    ],
)
def test_what_cannot_be_done_is_said(server: Running, body: dict[str, Any], says: str) -> None:
    content = json.dumps({"messages": MESSAGES, "max_tokens": 5, **body})
    response = server.http.post(URL, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


def test_a_schema_that_no_answer_is_held_to_is_taken_where_none_is(server: Running) -> None:
    assert ask(server, tools=function(parameters={"properties": {"x": {"oneOf": [{"type": "integer"}, {"not": {}}]}}}), max_tokens=3)["choices"]


def test_a_template_that_takes_a_field_for_granted_refuses_messages_without_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo().tokenizer, "chat_template", "{{ messages[0].content + 5 }}")
    response = server.post(URL, messages=MESSAGES)
    assert response.status_code == 400 and "chat template refuses" in response.json()["error"]["message"]
