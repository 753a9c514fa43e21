"""The texts in which Qwen models call functions, one of JSON and one of XML: how a call is spelled, read and held; knows no request and no stream.

JSON (Qwen2.5, Qwen3, Qwen3-Next):          XML (Qwen3-Coder, Qwen3.5):

    <tool_call>                                 <tool_call>
    {"name": "f", "arguments": {"x": 5}}        <function=f>
    </tool_call>                                <parameter=x>
                                                5
                                                </parameter>
                                                </function>
                                                </tool_call>
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.server.grammars import Grammars

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_REFERENCES = 8  # from definition to definition

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*")
_PARAMETER_BEGIN = re.compile(r"<parameter=([^<>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>\s*")
_FUNCTION_END = re.compile(r"</function>\s*")

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # models write these as well

Schemas = Mapping[str, dict[str, Any]]  # of the parameters, by function


class BrokenCallError(ValueError):
    """Text that is no call, or one of a function that does not exist."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object


class Arguments(ABC):
    """The arguments of one call that a grammar holds, as JSON that grows with the text."""

    is_complete = False

    @abstractmethod
    def take(self, text: str) -> tuple[str, int]:
        """The JSON that `text`, the call's text from where the last one ended, makes certain; and how many characters of it are used up."""

    def finish(self, text: str) -> str:
        """What is left of a call that was cut off."""
        return ""


class ToolFormat(ABC):
    name: ClassVar[str]
    end: ClassVar[str]  # what follows on the arguments of a call that a grammar holds

    @abstractmethod
    def begin(self, name: str) -> str:
        """What comes before the arguments of a call that a grammar holds."""

    @abstractmethod
    def held_arguments(self, schema: dict[str, Any]) -> Arguments: ...

    @abstractmethod
    def grammar(self, grammars: Grammars, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """The arguments as a part of a structural tag. Raises RequestError for a schema that no answer can be held to."""

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> Call | None:
        """The call that a model wrote between OPEN and CLOSE; None if this CLOSE is part of an argument. Raises BrokenCallError."""


class QwenJson(ToolFormat):
    name = "qwen_json"
    end = "}\n" + CLOSE

    def begin(self, name: str) -> str:
        return f'{OPEN}\n{{"name": "{name}", "arguments": '

    def held_arguments(self, schema: dict[str, Any]) -> Arguments:
        return _JsonArguments()

    def grammar(self, grammars: Grammars, schema: dict[str, Any], place: str) -> dict[str, Any]:
        return grammars.json_part(schema, place)

    def read(self, text: str, schemas: Schemas) -> Call | None:
        try:
            value = read_json(text)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                return None
            raise BrokenCallError from error
        except ValueError as error:
            raise BrokenCallError from error
        if not isinstance(value, dict) or not isinstance(value.get("arguments"), dict) or value.get("name") not in tuple(schemas):
            raise BrokenCallError
        return _call(value["name"], value["arguments"])


class _JsonArguments(Arguments):
    """JSON already; a string within holds no line break, so that the end is found for certain."""

    def __init__(self) -> None:
        self._taken = ""

    def take(self, text: str) -> tuple[str, int]:
        at = text.find(QwenJson.end)
        self.is_complete = at >= 0
        length = at if self.is_complete else len(text) - overlap(text, QwenJson.end)
        self._taken += text[:length]
        return text[:length], length + len(QwenJson.end) if self.is_complete else length

    def finish(self, text: str) -> str:
        """`text` may be a brace that is the arguments' own, or the one after them."""
        try:
            read_json(self._taken)
        except ValueError:
            return text
        return ""


class QwenXml(ToolFormat):
    name = "qwen_xml"
    end = "</function>\n" + CLOSE

    def begin(self, name: str) -> str:
        return f"{OPEN}\n<function={name}>\n"

    def held_arguments(self, schema: dict[str, Any]) -> Arguments:
        return _XmlArguments(schema)

    def grammar(self, grammars: Grammars, schema: dict[str, Any], place: str) -> dict[str, Any]:
        return grammars.xml_part(schema, place)

    def read(self, text: str, schemas: Schemas) -> Call | None:
        begin = _FUNCTION.match(text)
        if begin is None or begin[1] not in schemas:
            raise BrokenCallError
        arguments: dict[str, Any] = {}
        at = begin.end()
        while parameter := _PARAMETER_BEGIN.match(text, at):
            end = _PARAMETER_END.search(text, parameter.end())
            if end is None:
                return None
            arguments[parameter[1]] = _value(text[parameter.end() : end.start()], _property(schemas[begin[1]], parameter[1]))
            at = end.end()
        if _FUNCTION_END.fullmatch(text, at) is None:
            raise BrokenCallError
        return _call(begin[1], arguments)


class _XmlArguments(Arguments):
    """One parameter after the other, each once it is complete."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._num_taken = 0

    def take(self, text: str) -> tuple[str, int]:
        taken, at = "", len(text) - len(text.lstrip())
        while (begin := _PARAMETER_BEGIN.match(text, at)) and (end := _PARAMETER_END.search(text, begin.end())):
            value = _value(text[begin.end() : end.start()], _property(self._schema, begin[1]))
            taken += f"{', ' if self._num_taken else '{'}{write_json(begin[1])}: {write_json(value)}"
            self._num_taken += 1
            at = end.end()
        self.is_complete = text.startswith(QwenXml.end, at)
        if self.is_complete:
            return taken + ("}" if self._num_taken else "{}"), at + len(QwenXml.end)
        return taken, at


TOOL_FORMATS: dict[str, ToolFormat] = {one.name: one for one in (QwenJson(), QwenXml())}


def choose_tool_format(name: str, chat_template: str | None) -> ToolFormat:
    """By name; auto: the one that the model's chat template teaches."""
    if name != "auto":
        return TOOL_FORMATS[name]
    return TOOL_FORMATS["qwen_xml" if "<function=" in (chat_template or "") else "qwen_json"]


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, NaN and the infinities included, and for what is too deep to be read."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("too many levels") from error


def write_json(value: Any) -> str:
    """Raises ValueError for infinity, which a number like 1e999 is read as, and for what is too deep to be written."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("too many levels") from error
    # Half of a surrogate pair, which a model may write as an escape, can leave as one only.
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, shorter than it."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


def _call(name: str, arguments: dict[str, Any]) -> Call:
    try:
        return Call(name, write_json(arguments))
    except ValueError as error:
        raise BrokenCallError from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _property(schema: dict[str, Any], name: str) -> Any:
    """The schema of one parameter, references to definitions followed; None where there is none."""
    properties = schema.get("properties")
    found = properties[name] if isinstance(properties, dict) and name in properties else schema.get("additionalProperties")
    for _ in range(MAX_REFERENCES):
        if not isinstance(found, dict) or not isinstance(found.get("$ref"), str):
            break
        found = _at_pointer(schema, found["$ref"])
    return found


def _at_pointer(schema: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#").split("/")[1:]:
        schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def _value(text: str, schema: Any) -> Any:
    """A parameter's text as a value of a type that its schema names, and else as it stands. The schema is the client's, and may be anything."""
    types = _types(schema)
    if types == {"string"}:
        return _string(text, schema)
    try:
        value = read_json(_PYTHON_WORDS.get(text.strip(), text))
        write_json(value)
    except ValueError:
        return _string(text, schema)
    fits = not isinstance(value, str) and (not types or types & _types_of(value))
    return value if fits else _string(text, schema)


def _string(text: str, schema: Any) -> str:
    """Without the line breaks around it; where that leaves what the schema forbids, with as much of the space around it as is allowed."""
    starts = (text.removeprefix("\n"), text[1:] if text[:1].isspace() else text, text)
    candidates = [part for start in starts for part in (start.removesuffix("\n"), start[:-1] if start[-1:].isspace() else start, start)]
    return next((candidate for candidate in (*candidates, text.strip()) if _fits(candidate, schema)), candidates[0])


def _fits(text: str, schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    low, high, choices = (schema.get(word) for word in ("minLength", "maxLength", "enum"))
    if (isinstance(low, int) and len(text) < low) or (isinstance(high, int) and len(text) > high):
        return False
    return text in choices if isinstance(choices, list) else schema.get("const", text) == text


def _types(schema: Any) -> set[str]:
    """The types that a schema allows; empty: any."""
    if not isinstance(schema, dict):
        return set()
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {name for name in named if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        return {name for value in schema["enum"] for name in _types_of(value)}
    if "const" in schema:
        return _types_of(schema["const"])
    lists = [schema[word] for word in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(word), list)]
    branches = [_types(branch) for branch_list in lists for branch in branch_list]
    return set[str]().union(*branches) if all(branches) else set()


def _types_of(value: Any) -> set[str]:
    """JSON Schema's names for a value's type."""
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names = {type(None): {"null"}, bool: {"boolean"}, int: {"number", "integer"}, str: {"string"}, list: {"array"}, dict: {"object"}}
    return names[type(value)]
