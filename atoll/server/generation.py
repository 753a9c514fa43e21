"""The way of every generating request, whole or streamed: a place, token ids, sequences, an answer; what the answer looks like is a `Reply`'s matter."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from fastapi import Request
from starlette.responses import JSONResponse, Response

from atoll.engine.constraint import Constraint
from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.sampling import SamplingParams
from atoll.errors import AtollError, RequestError
from atoll.server.messages import SequenceTask
from atoll.server.protocol import GenerationBody, SchemaFormat, TextFormat
from atoll.server.replies import DONE, EventStream, as_json, error_body, event, status_of, while_connected
from atoll.server.service import Service
from atoll.server.usage import UsageCount

BodyT = TypeVar("BodyT", bound=GenerationBody)


class Reply(ABC, Generic[BodyT]):
    """One answer: prompts x n choices, in that order. Made in a thread beside the event loop, since it checks every token of the prompts."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    empty_chunk: ClassVar[dict[str, Any]]
    hides_output = False  # only the prompt is asked for

    def __init__(self, service: Service, body: BodyT, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        for prompt in prompts:
            for one in params:
                service.check_request(prompt, one, body.cache_salt)
            _check_length(len(prompt), body.asked_tokens, service.max_model_len)
        self.service = service
        self.body = body
        self.prompts = prompts
        self.tasks = [SequenceTask(prompt, one, body.cache_salt, self.constraint()) for prompt in prompts for one in params]
        self.usage = UsageCount(prompts, body.num_choices)
        self._id = f"{self.id_prefix}-{uuid4().hex}"
        self._created_s = int(time.time())
        self._begun: set[int] = set()  # choices of which something was streamed

    def constraint(self) -> Constraint | None:
        """A fresh one for each sequence; None where any text will do."""
        wanted = self.body.response_format
        if wanted is None or isinstance(wanted, TextFormat):
            return None
        return self.service.grammars.constraint(wanted.json_schema.schema_ if isinstance(wanted, SchemaFormat) else None)

    @abstractmethod
    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """A whole choice, without what all kinds have."""

    @abstractmethod
    def chunks(self, piece: StreamPiece, *, is_first: bool) -> list[dict[str, Any]]:
        """A choice's next chunks, without what all kinds have; none: nothing to say."""

    def finish_reason(self, index: int, output: RequestOutput) -> str:
        """Why a choice ended, asked for after its last part was."""
        return output.finish_reason

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            if self.hides_output:
                output = replace(output, text="", token_ids=[], logprobs=None)
            self.usage.add(len(output.token_ids))
            self.usage.finish(index, output)
            choice = {"index": index, **self.choice(index, output), **self._ending(index, output)}
            if self.body.return_token_ids:
                choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": output.token_ids}
            choices.append(choice)
        return self._envelope(self.whole_object, choices) | {"usage": self.usage.as_json()}

    async def events(self, first: list[StreamPiece], rest: AsyncIterator[list[StreamPiece]]) -> AsyncIterator[bytes]:
        """Server-sent events, [DONE] included. Those of a slow client leave together. What goes wrong is told in an event: the status has been sent."""
        try:
            yield self._events_of(first)
            async for pieces in rest:
                yield self._events_of(pieces)
            if self.body.include_usage:
                yield self._chunk_event([], {"usage": self.usage.as_json()})
        except AtollError as error:
            yield event(error_body(str(error), status_of(error)))
        yield DONE

    def _events_of(self, pieces: list[StreamPiece]) -> bytes:
        return b"".join(self._event_of(piece) for piece in pieces)

    def _event_of(self, piece: StreamPiece) -> bytes:
        if self.hides_output:
            piece = replace(piece, text="", token_ids=[], logprobs=())
        self.usage.add(len(piece.token_ids))
        if piece.output is not None:
            self.usage.finish(piece.index, piece.output)
        is_first = piece.index not in self._begun
        chunks = self.chunks(piece, is_first=is_first)
        if not chunks and piece.output is None and not self.body.return_token_ids:
            return b""
        self._begun.add(piece.index)
        choices = [{"index": piece.index, **chunk, **self._ending(piece.index, None)} for chunk in chunks or [self.empty_chunk]]
        choices[-1] |= self._ending(piece.index, piece.output)
        if self.body.return_token_ids:
            for choice in choices:
                choice["token_ids"] = piece.token_ids if choice is choices[0] else []
            if is_first:
                choices[0]["prompt_token_ids"] = self.tasks[piece.index].token_ids
        usage = {"usage": self.usage.as_json() if self.body.continuous_usage else None} if self.body.include_usage else {}
        return b"".join(self._chunk_event([choice], usage) for choice in choices)

    def _chunk_event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """The event of an envelope with `more`. Only what differs from chunk to chunk is encoded anew."""
        return b"".join((self._chunk_head, as_json(choices), *(b',"%s":%s' % (name.encode(), as_json(value)) for name, value in more.items()), b"}\n\n"))

    @cached_property
    def _chunk_head(self) -> bytes:
        return event(self._envelope(self.chunk_object, [])).removesuffix(b"[]}\n\n")

    def _ending(self, index: int, output: RequestOutput | None) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason(index, output) if output else None, "stop_reason": output.stop_reason if output else None}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self.service.model_name, "choices": choices}


async def generate(request: Request, body: BodyT, num_prompts: int, make_reply: Callable[[Service, BodyT], Reply[BodyT]]) -> Response:
    """Answer a request. Its place at the engine is given back whatever happens, the client's leaving included."""
    service: Service = request.app.state.service
    _check(service, body)
    ticket = service.loop.open(num_prompts * body.num_choices)
    try:
        reply = await service.in_thread(make_reply, service, body)
        ticket.submit(reply.tasks)
        if not body.stream:
            outputs = await while_connected(request, ticket.outputs())
            ticket.close()
            return JSONResponse(reply.whole(outputs))
        batches = ticket.batches()
        # Before the first piece the status is not sent, so that a refusal still has its own.
        first = await while_connected(request, anext(batches))
    except BaseException:
        ticket.close()
        raise
    return EventStream(reply.events(first, batches), ticket.close)


def _check(service: Service, body: GenerationBody) -> None:
    service.check_model(body.model)
    body.check(max_n=service.config.max_n)


def _check_length(num_prompt_tokens: int, asked_tokens: int | None, max_model_len: int) -> None:
    """An answer is cut at the model's length only where the client leaves its own open."""
    total = num_prompt_tokens + (asked_tokens or 0)
    if total > max_model_len:
        raise RequestError(
            f"prompt {num_prompt_tokens} + max_tokens {asked_tokens} = {total} tokens, {max_model_len} is the limit; lower max_tokens, or leave it out"
        )
