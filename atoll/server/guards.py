"""What is refused before anything reads a request: bodies that are too large, and clients without the key; knows no endpoint."""

import hmac
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.server.replies import error_reply


class BodyLimit:
    """Answers 413 to a request whose body is larger than `max_body_bytes`, said in its header or found while reading."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await self._refuse(scope, receive, send)
            return
        num_bytes, refused = 0, False

        async def limited_receive() -> Message:
            nonlocal num_bytes, refused
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                refused = True
                # To whoever reads the body the client is gone.
                return {"type": "http.disconnect"}
            return message

        async def limited_send(message: Message) -> None:
            if not refused:
                await send(message)

        await self._app(scope, limited_receive, limited_send)
        if refused:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than {self._max_body_bytes} bytes, the limit; send less at once"
        await error_reply(message, 413, headers={"Connection": "close"})(scope, receive, send)


class KeyCheck:
    """Answers 401 to a request without `Authorization: Bearer KEY`, but for `open_paths`."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        reply = error_reply("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", 401, code="invalid_api_key")
        reply.headers["WWW-Authenticate"] = "Bearer"
        await reply(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._api_key)


def _header(scope: Any, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
