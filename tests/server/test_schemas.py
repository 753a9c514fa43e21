"""Which JSON schemas are taken: those of which an answer is held to every word."""

from typing import Any

import pytest

from atoll.errors import RequestError
from atoll.server.schemas import schema_text

INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
WITH_Z = {"type": "object", "properties": {"z": {"type": "boolean"}}, "required": ["z"]}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "required": ["zz"]}, "requires 'zz', which is none of its own properties"),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "requires 'b'"),
        ({"properties": {"k": INTEGER}, "anyOf": [WITH_Z]}, "has 'properties' beside 'anyOf'"),
        ({"required": [], "allOf": [WITH_Z]}, "has 'required' beside 'allOf'"),
        ({"type": "string", "anyOf": [INTEGER, {"type": "boolean"}]}, "has the type 'string' beside 'anyOf', which allows others"),
        ({"anyOf": [{"type": "integer"}], "minimum": 100}, "has 'minimum' beside 'anyOf'"),
        ({"$ref": "#/$defs/a", "minimum": 100, "$defs": {"a": INTEGER}}, r"has 'minimum' beside '\$ref'"),
        ({"type": "object", "$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, r"has the type 'object' beside '\$ref'"),
        ({"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"has the type 'object' beside '\$ref'"),
        ({"type": "string", "enum": ["a", 1]}, "has the type 'string' beside 'enum'"),
        ({"enum": [7], "maximum": 3}, "has 'maximum' beside 'enum'"),
        ({"type": "string", "const": 5}, "has the type 'string' beside 'const'"),
        ({"$ref": "http://x/y"}, "is not within the schema"),
        ({"$ref": 5}, "is not within the schema"),
        ({"anyOf": []}, "give one schema at least"),
        ({"enum": []}, "an enum without a value"),
        ({"type": "object", "properties": None}, "has 'properties', which is no object"),
        ({"type": "array", "minItems": 1}, "has 'minItems' without 'items' or 'prefixItems'"),
        ({"type": "object", "minProperties": 1}, "has 'minProperties' without 'properties' or 'additionalProperties'"),
        ({"type": "string", "maxLength": -1}, "has the maxLength -1; give a whole number from 0"),
        ({"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"}, "with 3 repeats within each other, 2 is the limit"),
        ({"type": "string", "pattern": r"(?:[*+{]\*(b*[)]{2})+){3}"}, "with 3 repeats within each other"),
    ],
)
def test_a_schema_of_which_words_would_be_passed_over_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        schema_text({"type": "array", "items": schema} if "$defs" not in schema else schema, "the JSON schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": WITH_Z}},
        {"type": ["string", "null"], "enum": ["a", None], "description": "as pydantic writes them"},
        {"type": "number", "enum": [1, 2.5, 3.0]},
        {"type": "integer", "const": 3.0},
        {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Count"},
        {"type": "number", "anyOf": [INTEGER, {"allOf": [{"type": "number"}]}]},
        {"type": "string", "pattern": r"(?:[a-z]+,)*[(*+{]{3}\{\*\+"},
        {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]},
        {"type": "array", "items": INTEGER, "minItems": 0, "maxItems": 3},
    ],
)
def test_a_schema_of_which_every_word_counts_is_taken(schema: dict[str, Any]) -> None:
    assert schema_text(schema, "the JSON schema")
