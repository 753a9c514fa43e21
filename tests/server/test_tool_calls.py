"""Calls in a model's text: both spellings, whole and however the text is cut, good and broken, and whatever a grammar allows."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import TOOL_CALL_PARSERS
from atoll.errors import RequestError
from atoll.server import tool_calls
from atoll.server.grammars import Grammars
from atoll.server.tool_calls import CallArguments, CallBegin, ToolCallParser
from atoll.server.tool_formats import TOOL_FORMATS, choose_tool_format
from tests.server.running import demo
from tests.server.walks import random_walk

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "where": {"type": "object"},
            "near": {"type": ["number", "null"]},
            "now": {"type": "boolean"},
            "any": {},
            "ref": {"$ref": "#/$defs/list"},
        },
        "$defs": {"list": {"type": "array"}},
    },
    "no-arguments": {"type": "object", "properties": {}},
}
NAMES = sorted(TOOL_FORMATS)
TEXTS = {
    "qwen_json": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        '<tool_call>{"arguments":{"city":"a \\"quoted\\" </tool_call> and <tool_call> é\\n"},"name":"weather"}</tool_call>',
        '<tool_call>\n{"name": "no-arguments", "arguments": {}}\n</tool_call>',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        '<tool_call><function=weather><parameter=city>\na "quoted" </tool_call> and <tool_call> é\n\n</parameter></function></tool_call>',
        "<tool_call>\n<function=no-arguments>\n</function>\n</tool_call>",
    ],
}
CALLS = [
    ("weather", {"city": "Rome", "days": 3}),
    ("weather", {"city": 'a "quoted" </tool_call> and <tool_call> é\n'}),
    ("no-arguments", {}),
]
BROKEN = {
    "qwen_json": [
        "<tool_call>hello</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>',
        '<tool_call>{"name": "weather"}</tool_call>',
        '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome\n"}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>[1]</tool_call>",
    ],
    "qwen_xml": [
        "<tool_call>hello</tool_call>",
        "<tool_call><function=nobody></function></tool_call>",
        "<tool_call><function=weather><parameter=city>Rome</parameter></tool_call>",
        "<tool_call><function=weather>Rome</function></tool_call>",
        "<tool_call><function=weather></function> and more</tool_call>",
    ],
}


def read(pieces: list[str], name: str, *, is_held: bool = False, schemas: dict[str, Any] = SCHEMAS, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """Text, and calls with their arguments. Each call must begin before its arguments, and ids differ."""
    parser = ToolCallParser(TOOL_FORMATS[name], schemas, is_held=is_held, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    begins = [part for part in parts if isinstance(part, CallBegin)]
    assert [begin.index for begin in begins] == list(range(len(begins))) and len({begin.call_id for begin in begins}) == len(begins)
    arguments = [""] * len(begins)
    num_begun = 0
    for part in parts:
        num_begun += isinstance(part, CallBegin)
        if isinstance(part, CallArguments):
            assert part.index == num_begun - 1 and part.text
            arguments[part.index] += part.text
    return "".join(part for part in parts if isinstance(part, str)), [(begin.name, text) for begin, text in zip(begins, arguments, strict=True)]


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read(name: str) -> None:
    for text, call in zip(TEXTS[name], CALLS, strict=True):
        content, calls = read([text], name)
        assert (content, values(calls)) == ("", [call])
    content, calls = read(["Let me see.\n\n" + "\n".join(TEXTS[name]) + "\nDone. "], name)
    assert (content, values(calls)) == ("Let me see.Done. ", CALLS)
    # A model may end without the last tag.
    content, calls = read([TEXTS[name][0].removesuffix("</tool_call>")], name)
    assert (content, values(calls)) == ("", CALLS[:1])
    content, calls = read(["".join(TEXTS[name]) + "!"], name, max_calls=1)
    assert (content, values(calls)) == ("!", CALLS[:1])


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_call_is_text_and_the_next_one_is_read(name: str) -> None:
    for broken in BROKEN[name]:
        content, calls = read([f"a\n {broken} b\n{TEXTS[name][0]}"], name)
        assert (content, values(calls)) == (f"a\n {broken} b", CALLS[:1]), broken[:100]
        assert read([broken + " "], name) == (broken + " ", [])


@pytest.mark.parametrize("name", NAMES)
def test_text_without_calls_stays_as_it_is(name: str) -> None:
    for text in ("", " ", "<", "a <tool", "<tool_call", "</tool_call> a\n", " a \n\n", "<tool_call>", f" {TEXTS[name][0][:-20]}"):
        assert read([text], name) == (text, [])
        assert read(list(text), name) == (text, [])


def check_cuts(text: str, name: str, **options: Any) -> None:
    """Cut in two at every place, and into single characters."""
    whole = read([text], name, **options)
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]], name, **options) == whole, at
    assert read(list(text), name, **options) == whole


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_reads_the_same(name: str) -> None:
    check_cuts("a <tool " + TEXTS[name][1] + " \n" + BROKEN[name][2] + "\n" + TEXTS[name][0] + "\n", name)
    held = "\n".join((TEXTS[name][0], TEXTS[name][2]))
    assert values(read([held], name, is_held=True, has_text=False)[1]) == [CALLS[0], CALLS[2]]
    check_cuts(held, name, is_held=True, has_text=False)
    check_cuts("so: " + held + "?", name, is_held=True)


@pytest.mark.parametrize("name", NAMES)
def test_control_without_holding_back_half_a_marker_becomes_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "overlap", lambda text, mark: 0)
    with pytest.raises(AssertionError):
        check_cuts(TEXTS[name][0], name)


@pytest.mark.parametrize("name", NAMES)
def test_any_mixture_in_any_pieces(name: str) -> None:
    fragments = st.sampled_from(
        [*TEXTS[name], *BROKEN[name][:6], "<tool_call>", "</tool_call>", "<tool", "</parameter>", "<function=weather>", '{"name": "', '"', "a", " ", "\n", "}"]
    )

    @settings(max_examples=200, deadline=None)
    @given(st.lists(fragments, max_size=6), st.lists(st.integers(1, 40), max_size=30), st.booleans())
    def run(chosen: list[str], lengths: list[int], is_held: bool) -> None:
        text = "".join(chosen)
        pieces, at = [], 0
        for length in lengths:
            pieces.append(text[at : at + length])
            at += length
        whole = read([text], name, is_held=is_held)
        assert read([*pieces, text[at:]], name, is_held=is_held) == whole
        assert read(list(text), name, is_held=is_held) == whole
        if not is_held:
            values(whole[1])
            if not whole[1]:
                assert whole[0] == text

    run()


@pytest.mark.parametrize("name", NAMES)
def test_a_held_call_comes_out_while_it_grows(name: str) -> None:
    parser = ToolCallParser(TOOL_FORMATS[name], SCHEMAS, is_held=True)
    text = TEXTS[name][0]
    parts = parser.push(text[: text.index("days")])
    assert isinstance(parts[0], CallBegin) and next(part.text.replace(" ", "") for part in parts[1:] if isinstance(part, CallArguments)).startswith(
        '{"city":"Rome"'
    )
    assert parser.num_calls == 0
    parser.push(text[text.index("days") :])
    assert parser.num_calls == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_held_call_that_is_cut_off(name: str) -> None:
    """What is known of its arguments stays; what is not even a name is left out."""
    text = TEXTS[name][0]
    for at in range(1, len(text)):
        content, calls = read([text[:at]], name, is_held=True, has_text=False)
        assert content == "" and len(calls) == (at >= len(TOOL_FORMATS[name].begin("weather")))
        for _, arguments in calls:
            assert '{"city": "Rome", "days": 3}'.startswith(arguments)
    assert read(["so <tool_call>\n"], name, is_held=True) == ("so", [])
    assert read(["so <tool"], name, is_held=True) == ("so <tool", [])


def test_xml_values_have_their_schema_s_types() -> None:
    def value(parameter: str, text: str) -> Any:
        call = f"<tool_call><function=weather><parameter={parameter}>{text}</parameter></function></tool_call>"
        [(_, arguments)] = values(read([call], "qwen_xml")[1])
        return arguments[parameter]

    found = [
        (value("city", "\n5\n"), "5"),
        (value("city", "null"), "null"),
        (value("city", "\n\n two\nlines \n"), "\n two\nlines "),
        (value("days", " 5\n"), 5),
        (value("days", "five"), "five"),
        (value("days", "5.5"), "5.5"),
        (value("unit", "\n C "), "C"),
        (value("where", '{"x": "\\ud800"}'), {"x": "\ud800"}),
        (value("near", "null"), None),
        (value("near", "2"), 2),
        (value("now", "True"), True),
        (value("any", "[1, 2]"), [1, 2]),
        (value("any", "free text"), "free text"),
        (value("ref", "[1]"), [1]),
        (value("unknown", "7"), 7),
    ]
    assert [type(one) for one, _ in found] == [type(wanted) for _, wanted in found]
    for one, wanted in found:
        assert one == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [[]]}}},
        {"properties": {"a": {"enum": 5, "const": "x"}}},
        {"properties": {"a": {"anyOf": 5, "oneOf": [7]}}},
        {"properties": {"a": {"minLength": "x", "enum": [[]]}}},
        {"properties": {"a": {"$ref": "#/a/b"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"additionalProperties": False},
    ],
)
def test_a_schema_that_is_none_harms_no_free_call(schema: dict[str, Any]) -> None:
    _, [(_, arguments)] = read(["<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"], "qwen_xml", schemas={"f": schema})
    assert json.loads(arguments)["a"] in (5, "5")


def test_half_of_a_surrogate_pair_can_be_sent_on() -> None:
    _, [(_, arguments)] = read(['<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d é"}}</tool_call>'], "qwen_json")
    assert arguments.encode() and json.loads(arguments) == {"city": "\ud83d é"}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_too_deep_to_be_read_or_written_are_text(name: str) -> None:
    """Wherever within Python's limit the one or the other begins to fail."""
    num_calls = []
    for levels in range(100, 1100, 20):
        value = "[" * levels + "]" * levels
        text = {
            "qwen_json": f'<tool_call>{{"name": "weather", "arguments": {{"any": {value}}}}}</tool_call>',
            "qwen_xml": f"<tool_call><function=weather><parameter=any>{value}</parameter></function></tool_call>",
        }[name]
        content, calls = read([text], name)
        assert len(calls) == 1 or content == text
        num_calls.append(len(calls))
    assert num_calls[0] == 1 and num_calls[-1] == (name == "qwen_xml")


def test_names_that_xml_cannot_spell_are_refused() -> None:
    for name in ("", "a>b", "<a", "a\nb"):
        with pytest.raises(RequestError, match=r"tools.0 has the property '.*', which <parameter=NAME> cannot spell; rename it"):
            TOOL_FORMATS["qwen_xml"].grammar(Grammars(demo().tokenizer, 1536), {"type": "object", "properties": {name: {}}}, "tools.0")


def test_a_hostile_text_takes_no_time() -> None:
    """Closing tags within a string, each of which may be the end."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' + "</tool_call>" * 4000
    assert read([text[at : at + 12] for at in range(0, len(text), 12)], "qwen_json") == (text, [])


HELD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 4},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F", 5]},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 1, "maxItems": 2},
    },
    "required": ["text", "unit"],
}


def check_held(arguments: dict[str, Any]) -> None:
    assert {"text", "unit"} <= set(arguments) <= set(HELD["properties"])
    assert isinstance(arguments["text"], str) and 2 <= len(arguments["text"]) <= 4
    assert arguments["unit"] in ("C", "F", 5) and type(arguments["unit"]) in (str, int)
    assert type(arguments.get("count", 0)) is int and 0 <= arguments.get("count", 0) <= 99
    assert arguments.get("maybe") is None or type(arguments["maybe"]) is bool
    assert all(type(item) is int and 1 <= item <= 9 for item in arguments.get("list", [1])) and 1 <= len(arguments.get("list", [1])) <= 2


@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_grammar_allows_is_read_as_it_was_meant(name: str) -> None:
    """Random walks through what may come next; a JSON-minded reader of the same text finds no other call."""
    grammars, tool_format, draw = Grammars(demo().tokenizer, 1536), TOOL_FORMATS[name], random.Random(0)
    part = tool_format.grammar(grammars, HELD, "tools.0")
    form = {"type": "tag", "begin": tool_format.begin("f"), "content": part, "end": tool_format.end}
    lengths = set()
    for _ in range(30):
        token_ids = random_walk(grammars.tag_constraint(form), draw)
        text = demo().tokenizer.decode(token_ids)
        content, calls = read(list(text), name, is_held=True, has_text=False, schemas={"f": HELD})
        [(_, arguments)] = values(calls)
        assert content == ""
        check_held(arguments)
        if name == "qwen_json":
            assert values(read([text], name, schemas={"f": HELD})[1]) == values(calls)
        lengths.add(len(arguments))
    assert len(lengths) > 1


def test_the_chat_template_chooses() -> None:
    assert ("auto", *TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert choose_tool_format("auto", None).name == choose_tool_format("auto", "<tool_call>{{ tools }}").name == "qwen_json"
    assert choose_tool_format("auto", "<tool_call>\n<function=example>").name == "qwen_xml"
    assert choose_tool_format("qwen_json", "<function=").name == "qwen_json"
