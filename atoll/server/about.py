"""Endpoints that generate nothing: health, version, models, metrics, tokenizing, the prefix cache."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from atoll.engine.prompts import check_text, encode_conversation
from atoll.errors import RequestError
from atoll.models.tokenizer import Tokenizer
from atoll.server.logprobs import token_text
from atoll.server.metrics import CONTENT_TYPE
from atoll.server.protocol import DetokenizeBody, TokenizeBody
from atoll.server.replies import error_reply
from atoll.server.service import Service
from atoll.server.tool_choice import template_messages

router = APIRouter()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 with the reason once the engine has died, or the server is stopping."""
    fault = _service(request).loop.fault
    return JSONResponse({"status": "ok"}) if fault is None else error_reply(fault, 503)


@router.get("/version")
async def version(request: Request) -> dict[str, str]:
    """Atoll's version."""
    return {"version": _service(request).version}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(_service(request))]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """The same model by its name."""
    service = _service(request)
    service.check_model(name)
    return _model(service)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(_service(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """Token ids of a text, or of messages through the chat template."""
    service = _service(request)
    service.check_model(body.model)
    token_ids = await service.in_thread(_tokenize, service.tokenizer, body)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [token_text(service.tokenizer, token_id) for token_id in token_ids]
    return answer


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of token ids, special tokens spelled out."""
    service = _service(request)
    service.check_model(body.model)
    for token_id in body.tokens:
        if not 0 <= token_id < service.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary's 0 to {service.vocab_size - 1}; use ids of this model's tokenizer")
    return {"prompt": await service.in_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to spell prompts itself."""
    tokenizer = _service(request).tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "chat_template": tokenizer.chat_template,
        **tokenizer.role_tokens,
    }


@router.post("/reset_prefix_cache", response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every prefix; 409 while a request waits or runs."""
    try:
        await _service(request).loop.call("reset_prefix_cache")
    except RequestError as error:
        return error_reply(str(error), 409)
    return JSONResponse({"status": "ok"})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "atoll",
        "root": service.model_name,
        "max_model_len": service.max_model_len,
    }


def _tokenize(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give one of prompt and messages")
    if body.messages is not None:
        return encode_conversation(tokenizer, template_messages(body.messages))
    text = body.prompt or ""
    check_text("prompt", text)
    return tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
