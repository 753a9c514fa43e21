"""Makes the web application of a service: endpoints, guards, and every error in OpenAI's JSON; opens no port."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from atoll.errors import AtollError
from atoll.server import about, chat, completions, page
from atoll.server.description import describe
from atoll.server.guards import BodyLimit, KeyCheck
from atoll.server.replies import atoll_error_reply, body_error_reply, client_gone_reply, http_error_reply, unexpected_error_reply
from atoll.server.service import Service

OPEN_PATHS = frozenset(("/health", *page.PATHS))  # whoever watches the server needs no key, and the page asks for it


def make_app(service: Service) -> FastAPI:
    """The application; the service starts and stops with it. Pages of other origins cannot call it: no CORS header is ever sent."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    # The usual pages of documentation load scripts from elsewhere; the description itself is at /openapi.json.
    app = FastAPI(title="Atoll", version=service.version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.openapi = functools.cache(lambda: describe(app, service, OPEN_PATHS))  # type: ignore[method-assign]
    for router in (about.router, completions.router, chat.router, page.router):
        app.include_router(router)
    app.add_exception_handler(AtollError, atoll_error_reply)
    app.add_exception_handler(RequestValidationError, body_error_reply)
    app.add_exception_handler(HTTPException, http_error_reply)
    app.add_exception_handler(ClientDisconnect, client_gone_reply)
    app.add_exception_handler(Exception, unexpected_error_reply)
    app.add_middleware(BodyLimit, max_body_bytes=service.config.max_body_bytes)
    if service.config.api_key is not None:
        app.add_middleware(KeyCheck, api_key=service.config.api_key, open_paths=OPEN_PATHS)
    return app
