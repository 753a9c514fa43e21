"""`/v1/chat/completions`: messages through the model's chat template, answered."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.prompts import encode_conversation
from atoll.server.generation import Reply, generate
from atoll.server.logprobs import chat_logprobs
from atoll.server.protocol import ChatBody
from atoll.server.service import Service

router = APIRouter()


class ChatReply(Reply[ChatBody]):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody) -> None:
        prompt = encode_conversation(service.tokenizer, [message.plain for message in body.messages])
        max_tokens = body.max_completion_tokens or body.max_tokens or service.max_model_len
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__(service, body, [prompt], body.sampling_params(max_tokens=max_tokens, logprobs=logprobs))

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text}
        return {"message": message, "logprobs": self._logprobs(output.logprobs)}

    def chunk(self, piece: StreamPiece, *, is_first: bool) -> dict[str, Any] | None:
        delta: dict[str, str] = {"role": "assistant", "content": ""} if is_first else {}
        if piece.text:
            delta["content"] = piece.text
        logprobs = self._logprobs(piece.logprobs or None)
        return {"delta": delta, "logprobs": logprobs} if delta or logprobs or piece.finished else None

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(self.service.tokenizer, tokens)


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await generate(request, body, 1, ChatReply)
