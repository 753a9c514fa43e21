"""What a JSON schema may say, so that an answer is held to all of it by xgrammar; compiles nothing."""

import json
import re
from typing import Any

from atoll.errors import RequestError

MAX_SCHEMA_CHARS = 65_536
# Lists and objects within each other. The time to compile grows with a power of it: 900 arrays in each other took more than 30 s, 300 objects 5 s (one core).
MAX_SCHEMA_DEPTH = 64
# Repeats within each other in a pattern. With three, ((a{1,100}){1,100}){1,100}, one token in forty took more than a second of the engine's thread (one core).
MAX_PATTERN_REPEATS = 2

# What xgrammar holds an answer to. It passes over other words, so they are refused: an answer must not break a schema that was accepted.
_SUBSCHEMAS = frozenset(("items", "additionalProperties"))
_LISTS_OF_SCHEMAS = frozenset(("anyOf", "allOf", "prefixItems"))
_NAMED_SCHEMAS = frozenset(("properties", "$defs", "definitions"))
_VALUES = frozenset(
    (
        "type",
        "enum",
        "const",
        "required",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minProperties",
        "maxProperties",
        "$ref",
    )
)
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"))
_FORMATS = frozenset(
    (
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    )
)
# Lookaround, named and backward references, word boundaries: anything but a plain group.
_BEYOND_REGULAR = re.compile(r"\(\?(?!:)|\\[1-9bBk]")
# A quote, a backslash or a control character by itself, or an escape that may be one: xgrammar writes it into the JSON string as it is, which then is no JSON.
_BEYOND_JSON = re.compile(r'["\x00-\x1f]|\\(?:[\\tnrfvcx0]|u00)')
# Where one of these is, xgrammar passes over the words beside it.
_DECIDING = ("$ref", "anyOf", "allOf", "enum", "const")
_DEFINITIONS = frozenset(("$defs", "definitions"))
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
# Words that mean nothing to xgrammar without one of the others.
_NEEDS = {
    "minItems": ("items", "prefixItems"),
    "maxItems": ("items", "prefixItems"),
    "minProperties": ("properties", "additionalProperties"),
    "maxProperties": ("properties", "additionalProperties"),
}


def check_schema_size(schema: Any, place: str) -> str:
    """The schema as text. Raises RequestError for one that is too deep or too large for anything to be done with it."""
    depth = _depth(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(f"{place} is {depth} levels deep, {MAX_SCHEMA_DEPTH} is the limit; give a flatter one")
    text = json.dumps(schema, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(f"{place} holds half of a surrogate pair, which is no text; send whole characters")
    if len(text) > MAX_SCHEMA_CHARS:
        raise RequestError(f"{place} has {len(text)} characters, {MAX_SCHEMA_CHARS} is the limit; give a smaller one")
    return text


def schema_text(schema: dict[str, Any] | bool, place: str) -> str:
    """The schema as text. Raises RequestError for one that an answer could not be held to, wholly."""
    text = check_schema_size(schema, place)
    _check_words(schema, place, schema)
    return text


def _check_words(schema: Any, place: str, root: Any) -> None:
    """Raise RequestError for a schema, or one within it, that says more than an answer is held to."""
    if not isinstance(schema, dict):
        return
    for word, value in schema.items():
        if word in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise RequestError(f"{place} has {word!r}, which is no object; give a schema for each name")
            for name, part in value.items():
                _check_words(part, f"{place}, {word} {name!r}", root)
        elif word in _LISTS_OF_SCHEMAS:
            if not isinstance(value, list) or not value:
                raise RequestError(f"{place} has {word!r}, which is no list of schemas; give one schema at least")
            if word == "allOf" and len(value) > 1:
                raise RequestError(f"{place} has an allOf of {len(value)}, 1 is the limit; merge them into one schema")
            for part in value:
                _check_words(part, f"{place}, {word}", root)
        elif word in _SUBSCHEMAS:
            _check_words(value, f"{place}, {word}", root)
        elif word not in _VALUES | _NOTES:
            remedy = "use anyOf" if word == "oneOf" else "leave it out"
            raise RequestError(f"{place} has {word!r}, to which no answer is held; {remedy}")
        else:
            _check_value(word, value, schema, place)
    _check_deciding(schema, place, root)


def _check_value(word: str, value: Any, schema: dict[str, Any], place: str) -> None:
    if word == "format" and (not isinstance(value, str) or value not in _FORMATS):
        raise RequestError(f"{place} has the format {value!r}, which is none of {', '.join(sorted(_FORMATS))}; use one of these, or a pattern")
    if word == "pattern" and isinstance(value, str):
        _check_pattern(value, place)
    if word in ("minLength", "maxLength") and not {"pattern", "format"}.isdisjoint(schema):
        raise RequestError(f"{place} has {word!r} beside a pattern or format, to which alone an answer is held; put the length into the pattern")
    if word in _COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise RequestError(f"{place} has the {word} {str(value)[:40]}; give a whole number from 0")
    if word in _NEEDS and not set(_NEEDS[word]) & set(schema):
        raise RequestError(f"{place} has {word!r} without {' or '.join(map(repr, _NEEDS[word]))}; say of what it counts")
    if word == "required" and isinstance(value, list):
        properties = schema.get("properties")
        for name in value:
            if not isinstance(properties, dict) or not isinstance(name, str) or name not in properties:
                raise RequestError(f"{place} requires {str(name)[:40]!r}, which is none of its own properties; give a schema for it there")
    if word == "$ref" and (not isinstance(value, str) or not value.startswith("#")):
        raise RequestError(f"{place} has the $ref {str(value)[:80]!r}, which is not within the schema; put it under $defs, and write #/$defs/NAME")
    if word == "enum" and (not isinstance(value, list) or not value):
        raise RequestError(f"{place} has an enum without a value; give one at least")


def _check_pattern(pattern: str, place: str) -> None:
    if _BEYOND_REGULAR.search(pattern):
        raise RequestError(f"{place} has the pattern {pattern!r} with lookaround, a reference or a word boundary; write it without")
    if _BEYOND_JSON.search(pattern):
        raise RequestError(f"{place} has the pattern {pattern!r} with a quote, a backslash or a control character to match; write it without")
    depth = _repeat_depth(pattern)
    if depth > MAX_PATTERN_REPEATS:
        raise RequestError(
            f"{place} has the pattern {pattern[:80]!r} with {depth} repeats within each other, {MAX_PATTERN_REPEATS} is the limit; write it flatter"
        )


def _repeat_depth(pattern: str) -> int:
    """How many repeats (* + {}) lie within each other at most."""
    depths, atom, at = [0], 0, 0  # of each open group: the deepest in it; of the last atom
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            atom, at = 0, at + 1
        elif char == "[":
            atom = 0
            at += 1
            while at < len(pattern) and pattern[at] != "]":
                at += 2 if pattern[at] == "\\" else 1
        elif char == "(":
            depths.append(0)
        elif char == ")" and len(depths) > 1:
            atom = depths.pop()
            depths[-1] = max(depths[-1], atom)
        elif char in "*+{":
            atom += 1
            depths[-1] = max(depths[-1], atom)
            end = pattern.find("}", at) if char == "{" else -1
            at = max(at, end)
        elif char != "?":
            atom = 0
        at += 1
    return max(depths)


def _check_deciding(schema: dict[str, Any], place: str, root: Any) -> None:
    """Beside a word that decides alone, others would be passed over; a type may stand there, if it says nothing new."""
    deciding = next((word for word in _DECIDING if word in schema), None)
    if deciding is None:
        return
    others = [word for word in schema if word not in _NOTES | _DEFINITIONS | {deciding, "type"}]
    if others:
        raise RequestError(f"{place} has {others[0]!r} beside {deciding!r}, to which alone an answer is held; write both into one schema")
    if "type" in schema:
        found, allowed = _types({deciding: schema[deciding]}, root, ()), _types({"type": schema["type"]}, root, ())
        if found is None or allowed is None or not found <= allowed:
            raise RequestError(f"{place} has the type {str(schema['type'])[:80]!r} beside {deciding!r}, which allows others; say the type there")


def _types(schema: Any, root: Any, seen: tuple[str, ...]) -> frozenset[str] | None:
    """The JSON types that a schema allows, numbers that are whole as "integer" too; None: any, or not known."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        reference = schema["$ref"]
        return None if reference in seen else _types(_resolve(reference, root), root, (*seen, reference))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_type_of(value) for value in values)
    for word in ("anyOf", "allOf"):
        if word in schema:
            parts = [_types(part, root, seen) for part in schema[word]]
            return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    if "type" not in schema:
        return None
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    found = frozenset(name for name in named if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}
    return names[type(value)]


def _resolve(reference: str, root: Any) -> Any:
    """What #/a/b names; None: nothing."""
    found = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [part for one in level if isinstance(one, (dict, list)) for part in (one.values() if isinstance(one, dict) else one)]
    return depth
