"""What is wrong with a body that does not fit its model, in a sentence with the field's path; knows no endpoint."""

import json
from collections.abc import Sequence
from typing import Any

MAX_NAMED = 3
MAX_SHOWN_CHARS = 60

Fault = dict[str, Any]  # one of pydantic's

# What a value must be, by pydantic's type of the fault.
_EXPECTED = {
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}


def body_faults(faults: Sequence[Fault], body: Any) -> tuple[str, str | None]:
    """A sentence for each field that is wrong, and the path of the first. Of the branches of a union, the one that fits best is told of."""
    fields: dict[str, list[tuple[tuple[str, ...], Fault]]] = {}
    for fault in faults:
        place = _place(fault, body)
        fields.setdefault(place[0] if place else "", []).append((place, fault))
    deepest = [max(field, key=lambda placed: len(placed[0]))[0] for field in fields.values()]
    sentences = [_sentence(".".join(place), [fault for at, fault in field if at == place]) for place, field in zip(deepest, fields.values(), strict=True)]
    return "; ".join(sentences[:MAX_NAMED]), ".".join(deepest[0]) or None


def unreadable_body(cause: BaseException | None) -> str:
    """For what could not even be read as JSON."""
    if isinstance(cause, RecursionError):
        return "the body has too many lists and objects within each other to be read, about 1000 are the limit; send a flatter one"
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8 at byte {cause.start}; encode it so"
    return "the body cannot be read as JSON, for a number of more than 4300 digits; send a shorter one"


def _place(fault: Fault, body: Any) -> tuple[str, ...]:
    """The path within the body; pydantic's has names of branches as well."""
    if fault["type"] == "json_invalid":
        return ()
    place: list[str] = []
    for part in fault["loc"][1:]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            place.append(str(part))
            body = body[part]
    if fault["type"] == "missing" and len(fault["loc"]) > 1:
        place.append(str(fault["loc"][-1]))
    if fault["type"].startswith("union_tag"):
        place.append("type")
    return tuple(_cut(part) for part in place)


def _sentence(place: str, faults: list[Fault]) -> str:
    """For faults at one place: what it must be in any branch, unless a branch says more."""
    wanted: list[str] = []
    for fault in faults:
        expected = fault["ctx"]["expected"] if fault["type"] == "literal_error" else _EXPECTED.get(fault["type"])
        if expected is None:
            return _special(place or "the body", fault)
        wanted += [expected] if expected not in wanted else []
    alternatives = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if len(wanted) > 1 else wanted)
    return f"{place or 'the body'} is {_shown(faults[0]['input'])}, and must be {alternatives}"


def _special(place: str, fault: Fault) -> str:
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    match kind:
        case "missing":
            return f"{place} is missing; give it"
        case "extra_forbidden":
            return f"{place} is unknown; leave it out"
        case "json_invalid":
            return f"the body is not JSON: {context.get('error', fault['msg'])} at character {fault['loc'][-1]}"
        case "string_unicode":
            return f"{place} {_shown(value)} holds half of a surrogate pair, which is no text; send whole characters"
        case "invalid_key":
            return f"{place} has a name that is no text; send whole characters"
        case "string_too_long":
            return f"{place} has {len(value)} characters, {context['max_length']} is the limit; give fewer"
        case "too_long":
            return f"{place} has {len(value)} entries, {context['max_length']} is the limit; give fewer"
        case "too_short":
            return f"{place} has {len(value)} entries, {context['min_length']} is the least; give more"
        case "greater_than_equal":
            return f"{place} {_shown(value)} is below {context['ge']}; raise it"
        case "less_than_equal":
            return f"{place} {_shown(value)} is above {context['le']}; lower it"
        case "union_tag_not_found":
            return f"{place} is missing; give it"
        case "union_tag_invalid":
            return f"{place} is {_shown(context['tag'])}, and must be one of {context['expected_tags']}"
    return f"{place} is {_shown(value)}, which is not taken; /openapi.json describes what is"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return _cut(repr(value) if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
