"""`/v1/completions`: prompts as text or token ids, continued; with `echo`, repeated and scored."""

from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from atoll.engine.output import RequestOutput, StreamPiece, TokenLogprobs
from atoll.engine.prompts import encode_prompt
from atoll.server.generation import Reply, generate
from atoll.server.logprobs import CompletionLogprobs
from atoll.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionBody
from atoll.server.service import Service

router = APIRouter()


class CompletionReply(Reply[CompletionBody]):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    empty_chunk: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}

    def __init__(self, service: Service, body: CompletionBody) -> None:
        tokenizer = service.tokenizer
        prompts = [encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling_params(max_tokens=max(1, max_tokens), logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
        super().__init__(service, body, prompts, params)
        # An echo alone still runs for one token.
        self.hides_output = max_tokens == 0
        self._echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompts] if body.echo else []
        self._logprobs = [CompletionLogprobs(tokenizer) for _ in self.tasks] if body.logprobs is not None else []

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {"text": self._echo(index) + output.text, "logprobs": self._logprob_lists(index, output.prompt_logprobs, output.logprobs or ())}

    def chunks(self, piece: StreamPiece, *, is_first: bool) -> list[dict[str, Any]]:
        text = (self._echo(piece.index) if is_first else "") + piece.text
        logprobs = self._logprob_lists(piece.index, piece.prompt_logprobs, piece.logprobs)
        return [{"text": text, "logprobs": logprobs}] if text or logprobs or piece.finished else []

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.body.num_choices] if self._echoes else ""

    def _logprob_lists(self, index: int, prompt: Sequence[TokenLogprobs | None] | None, output: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        # Nothing comes before a prompt's first token, so that it has an id and no probability.
        scored = [token or self.tasks[index].token_ids[0] for token in prompt or ()]
        return self._logprobs[index].take([*scored, *output])


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    return await generate(request, body, len(body.prompts), CompletionReply)
