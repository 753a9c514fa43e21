"""The page at `/`, for people: a chat, and the pool as it is now. Its files load nothing from elsewhere; what they show is at `/pool`."""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from atoll.server.pool_view import PoolView
from atoll.server.service import Service

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {file.name: file.read_bytes() for file in files("atoll.server").joinpath("static").iterdir() if file.name.rpartition(".")[2] in MEDIA_TYPES}
PATHS = ("/", *(f"/page/{name}" for name in FILES))  # these tell nothing of the server, and so need no key

HEADERS = {
    # No inline script, nothing from elsewhere, and no other page may frame this one.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def part(name: str) -> Response:
    """Its style, scripts and icon."""
    if name not in FILES:
        raise HTTPException(404, "Not Found")
    return _file(name)


@router.get("/pool")
async def pool(request: Request) -> dict[str, Any]:
    """The pool, one letter per page; requests, tokens, and what was reused. Answered between two steps of the engine."""
    service: Service = request.app.state.service
    view: PoolView = await service.loop.call("pool_view")
    return {**view.as_json(), "num_generated": service.metrics.num_generated}


def _file(name: str) -> Response:
    return Response(FILES[name], media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=HEADERS)
