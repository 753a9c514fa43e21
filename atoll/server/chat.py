"""`/v1/chat/completions`: messages and tools through the model's chat template, answered by text or by calls."""

from collections.abc import Iterable
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from atoll.engine.constraint import Constraint
from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.prompts import encode_conversation
from atoll.server.generation import Reply, generate
from atoll.server.logprobs import chat_logprobs
from atoll.server.protocol import ChatBody
from atoll.server.service import Service
from atoll.server.tool_calls import CallBegin, Part, ToolCallParser
from atoll.server.tool_choice import ToolChoice, template_messages, template_tools

router = APIRouter()


class ChatReply(Reply[ChatBody]):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty_chunk: ClassVar[dict[str, Any]] = {"delta": {}, "logprobs": None}

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._tools = ToolChoice(body, service.tool_format) if body.offered_tools else None
        self._form = self._tools.form(service.grammars) if self._tools is not None else None
        self._parsers: dict[int, ToolCallParser] = {}  # by choice
        prompt = encode_conversation(service.tokenizer, template_messages(body.messages), template_tools(body))
        max_tokens = service.max_model_len if body.asked_tokens is None else body.asked_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__(service, body, [prompt], body.sampling_params(max_tokens=max_tokens, logprobs=logprobs))

    def constraint(self) -> Constraint | None:
        return super().constraint() if self._form is None else self.service.grammars.tag_constraint(self._form)

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {"message": _message(self._parts(index, output.text, is_last=True)), "logprobs": self._logprobs(output.logprobs)}

    def chunks(self, piece: StreamPiece, *, is_first: bool) -> list[dict[str, Any]]:
        deltas = [_delta(part) for part in self._parts(piece.index, piece.text, is_last=piece.finished)]
        logprobs = self._logprobs(piece.logprobs or None)
        if not deltas and (is_first or logprobs or piece.finished):
            deltas.append({})
        if is_first:
            deltas[0] = {"role": "assistant", "content": "", **deltas[0]}
        return [{"delta": delta, "logprobs": logprobs if at == 0 else None} for at, delta in enumerate(deltas)]

    def finish_reason(self, index: int, output: RequestOutput) -> str:
        called = index in self._parsers and self._parsers[index].num_calls > 0
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason

    def _parts(self, index: int, text: str, *, is_last: bool) -> list[Part]:
        if self._tools is None:
            return [text] if text else []
        parser = self._parsers.setdefault(index, self._tools.parser())
        return parser.push(text) + (parser.finish() if is_last else [])

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(self.service.tokenizer, tokens)


def _message(parts: Iterable[Part]) -> dict[str, Any]:
    text, calls = "", list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, str):
            text += part
        elif isinstance(part, CallBegin):
            calls.append(_call(part))
        else:
            calls[part.index]["function"]["arguments"] += part.text
    return {"role": "assistant", "content": text or None, "tool_calls": calls} if calls else {"role": "assistant", "content": text}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, CallBegin):
        return {"tool_calls": [{"index": part.index, **_call(part)}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _call(begin: CallBegin) -> dict[str, Any]:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await generate(request, body, 1, ChatReply)
