"""The description of the API, at /openapi.json: FastAPI's own, with the answers and refusals that really come, and with this server's limits."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atoll.engine import sampling
from atoll.server import answers
from atoll.server.protocol import ChatBody, CompletionBody
from atoll.server.service import Service

REF = "#/components/schemas/{model}"

READS = (400, 404, 413)
GENERATES = (*READS, 429, 500, 503)
# By path: the body of an answer with 200, and what else may come. Not here: 401, which comes with a key, and 405.
ANSWERS: dict[str, tuple[type[BaseModel], tuple[int, ...]]] = {
    "/health": (answers.Status, (503,)),
    "/version": (answers.Version, ()),
    "/v1/models": (answers.ModelList, ()),
    "/v1/models/{name}": (answers.ModelCard, (404,)),
    "/tokenize": (answers.TokenList, READS),
    "/detokenize": (answers.Text, READS),
    "/tokenizer_info": (answers.TokenizerInfo, ()),
    "/reset_prefix_cache": (answers.Status, (409, 503)),
    "/v1/completions": (answers.Completion, GENERATES),
    "/v1/chat/completions": (answers.ChatCompletion, GENERATES),
    "/pool": (answers.Pool, (503,)),
}
PLAIN_TEXT = ("/metrics",)
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
EXAMPLES = {
    "CompletionBody": {"prompt": "Question: What is 6 * 7?\nAnswer:", "max_tokens": 8, "temperature": 0},
    "ChatBody": {"messages": QUESTION, "max_tokens": 8, "stream": True},
    "TokenizeBody": {"messages": QUESTION},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
}
LIMITED = ("CompletionBody", "ChatBody", "DetokenizeBody")
WORDS = {"integer": (NUMBER := ("minimum", "maximum", "exclusiveMinimum")), "number": NUMBER, "string": ("minLength",), "array": ("minItems",)}
REFUSALS = {
    400: "The body is wrong; the message says what, and what to do.",
    401: "The key is missing or wrong.",
    404: "The model is not served here.",
    409: "A request waits or runs.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The request failed; others go on.",
    503: "The engine has died, or the server is stopping.",
}


def describe(app: FastAPI, service: Service, open_paths: Collection[str]) -> dict[str, Any]:
    """`open_paths` need no key where the server has one."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = found["components"]["schemas"]
    models = {model for model, _ in ANSWERS.values()} | {answers.Error}
    _, told = models_json_schema([(model, "serialization") for model in sorted(models, key=lambda model: model.__name__)], ref_template=REF)
    schemas |= told["$defs"]
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, has_key=service.config.api_key is not None and path not in open_paths)
            if service.config.api_key is not None:
                operation["security"] = [] if path in open_paths else [{"key": []}]
    if service.config.api_key is not None:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _limit(schemas, service)
    return found


def _responses(path: str, *, has_key: bool) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    if path in PLAIN_TEXT:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        statuses: tuple[int, ...] = ()
    else:
        model, statuses = ANSWERS[path]
        content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
    if statuses == GENERATES:
        content["text/event-stream"] = {}  # as OpenAPI 3.1 has no word for events
    if has_key:
        statuses += (401,)
    return {"200": {"description": "The answer.", "content": content}} | {
        str(status): {"description": REFUSALS[status], "content": refusal} for status in sorted(statuses)
    }


def _limits(service: Service) -> dict[str, dict[str, Any]]:
    """By field, what is checked beyond the types: JSON schema's words for it, each for the types that know it."""
    token_id = {"minimum": 0, "maximum": service.vocab_size - 1}
    penalty = {"minimum": -sampling.MAX_PENALTY, "maximum": sampling.MAX_PENALTY}
    logprobs = {"minimum": 0, "maximum": sampling.MAX_LOGPROBS}
    return {
        "prompt": token_id | {"minLength": 1, "minItems": 1},
        "tokens": token_id,
        "stop_token_ids": token_id,
        "stop": {"minLength": 1},
        "min_tokens": {"minimum": 0},
        "n": {"maximum": service.config.max_n},
        "temperature": {"minimum": 0, "maximum": sampling.MAX_TEMPERATURE},
        "top_k": {"minimum": -1},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": 0, "maximum": sampling.MAX_SEED},
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": {"minimum": sampling.MIN_REPETITION, "maximum": sampling.MAX_REPETITION},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "cache_salt": {"minLength": 1},
    }


def _limit(schemas: dict[str, Any], service: Service) -> None:
    """Say in the bodies' schemas what they are held to."""
    limits = _limits(service)
    for name in LIMITED:
        fields = schemas[name]["properties"]
        for field in fields.keys() & limits.keys():
            _narrow(fields[field], limits[field])
    for name, example in EXAMPLES.items():
        schemas[name]["properties"]["model"] = {"enum": [service.model_name, None]}
        schemas[name]["examples"] = [example]
    for body in (CompletionBody, ChatBody):
        schemas[body.__name__]["properties"] |= {field: {"enum": list(accepted)} for field, accepted in body.neutral.items()}


def _narrow(schema: dict[str, Any], limit: dict[str, Any]) -> None:
    for branch in schema.get("anyOf", [schema]):
        known = WORDS.get(branch.get("type"), ())
        branch |= {word: value for word, value in limit.items() if word in known}
        if "items" in branch:
            _narrow(branch["items"], limit)
