"""An OpenAI-compatible server as its clients see it: its address, its model's name, and what its errors say. Sends no prompt."""

import json
from dataclasses import dataclass, field
from typing import Any

# Both have the same interface; the newer one comes with transformers.
try:
    import httpx2 as http
except ImportError:
    import httpx as http  # type: ignore[import-not-found, no-redef]

from atoll.errors import ConfigError

# Seconds. An answer may be long in coming, a connection may not.
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    base_url: str  # without /v1
    model: str  # as the server calls it
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def url(self, path: str) -> str:
        return f"{self.base_url}/v1/{path}"


def find_endpoint(base_url: str, *, model: str | None = None, api_key: str | None = None) -> Endpoint:
    """Ask a server what it serves. `model` None: its first model. Raises ConfigError for an address where no such server answers."""
    url = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = http.get(f"{url}/v1/models", headers=headers, timeout=CONNECT_TIMEOUT_S, trust_env=False)
    except (http.HTTPError, http.InvalidURL) as error:
        raise ConfigError(f"base url {base_url!r} does not answer: {error}; start the server, or give an address like http://127.0.0.1:8000") from error
    if response.status_code != 200:
        raise ConfigError(f"base url {base_url!r} says to /v1/models {error_text(response.status_code, response.content)}; check the address and --api-key")
    try:
        served = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"base url {base_url!r} answers /v1/models, but not as OpenAI's API does: {error!r}; give an OpenAI-compatible server") from error
    if not served or (model is not None and model not in served):
        raise ConfigError(f"model {model!r} is not served at {base_url!r}; use one of {', '.join(served) or '(none is served)'}")
    return Endpoint(url, model or served[0], headers)


def timeout() -> http.Timeout:
    return http.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)


def error_text(status: int, body: bytes) -> str:
    """`429: the queue is full`, from OpenAI's error JSON or from whatever the body is."""
    try:
        told: Any = json.loads(body)
        told = told.get("error", told)
        told = told["message"] if isinstance(told, dict) and "message" in told else told
    except (ValueError, AttributeError):
        told = body.decode("utf-8", "replace")
    return f"{status}: {str(told)[:300]}"
