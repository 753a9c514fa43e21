"""How every answer leaves the server: errors in OpenAI's JSON, server-sent events, and clients that went away; knows no model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from atoll.errors import AtollError, ModelError, OverloadedError, RequestError, UnavailableError, UnknownModelError
from atoll.server.faults import body_faults, unreadable_body

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; for the log
DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def error_reply(message: str, status: int, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, status, param=param, code=code), status, headers)


def status_of(error: AtollError) -> int:
    """The HTTP status for an error: the request's own faults are 4xx."""
    if isinstance(error, UnknownModelError):
        return 404
    # A model without a chat template was asked to chat.
    if isinstance(error, (RequestError, ModelError)):
        return 400
    if isinstance(error, OverloadedError):
        return 429
    return 503 if isinstance(error, UnavailableError) else 500


def atoll_error_reply(_: Request, error: Exception) -> Response:
    assert isinstance(error, AtollError)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return error_reply(str(error), status_of(error), code="model_not_found" if isinstance(error, UnknownModelError) else None, headers=headers)


def http_error_reply(request: Request, error: Exception) -> Response:
    """For a path or a method that does not exist, and a body that cannot be read."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return error_reply(unreadable_body(error.__cause__), 400)
    return error_reply(f"{request.method} {request.url.path}: {error.detail}", error.status_code, headers=dict(error.headers or {}))


def body_error_reply(request: Request, error: Exception) -> Response:
    """For a body that does not fit its model."""
    assert isinstance(error, RequestValidationError)
    if not request.headers.get("content-type", "").partition(";")[0].strip().endswith("json"):
        sent = request.headers.get("content-type", "no Content-Type")
        return error_reply(f"the body came as {sent!r}, and is read as JSON alone; send the header 'Content-Type: application/json'", 400)
    message, place = body_faults(error.errors(), error.body)
    return error_reply(message, 400, param=place)


def unexpected_error_reply(_: Request, error: Exception) -> Response:
    return error_reply(f"the server failed: {type(error).__name__}; its log has the details", 500)


def client_gone_reply(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def as_json(value: object) -> bytes:
    return _encode(value).encode()


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; it is cancelled, and ClientDisconnect raised, when the client goes. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Server-sent events as they come. However it ends, the client's leaving included, `close` is called."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # Proxies must not hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, gone = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writer, gone), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        except OSError:
            # The client went away while something was sent.
            pass
        finally:
            self._close()
            await _cancel(writer, gone)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
