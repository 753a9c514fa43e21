"""The errors that Atoll raises for mistakes at its boundaries.

AtollError
├── SpecError        a shape, dtype, format or table that an operation cannot take
├── BackendError     a backend that was asked for by name, or every backend, cannot run here
├── ConfigError      an engine or command option out of range
├── RequestError     one request's prompt or sampling parameters
│   └── UnknownModelError  the name of a model that is not served
├── ModelError       a model that is missing, unsupported or damaged
├── PoolError        the page pool
│   ├── OutOfPagesError    fewer pages are free than were asked for
│   ├── OutOfSlotsError    no state slot is free
│   └── PoolCorruptError   a recount disagrees with the books (a bug, found by check())
└── ServerError      a request that the server cannot answer, through no fault of its own
    ├── OverloadedError    too many wait; try again later
    ├── UnavailableError   the engine has died, or the server is stopping
    └── GenerationError    it began, and went wrong

Every message names the value, the limit and the remedy, in that order.
`assert` is kept for what only a bug in Atoll can break.
"""


def counted(count: int, noun: str) -> str:
    """`1 question`, `2 questions`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose."""


class SpecError(AtollError, ValueError):
    """A shape, dtype, format or table that an operation cannot take."""


class BackendError(AtollError, RuntimeError):
    """No backend, or not the one asked for by name, can run here."""


class ConfigError(AtollError, ValueError):
    """An engine or command option out of range."""


class RequestError(AtollError, ValueError):
    """One request's prompt or sampling parameters; no other request is touched."""


class UnknownModelError(RequestError):
    """A request names a model that is not served."""


class ModelError(AtollError, ValueError):
    """A model that is missing, unsupported or damaged."""


class PoolError(AtollError, RuntimeError):
    """The page pool refused an operation."""


class OutOfPagesError(PoolError):
    """Fewer pages are free than were asked for; nothing was allocated."""


class OutOfSlotsError(PoolError):
    """No state slot is free; nothing was allocated."""


class PoolCorruptError(PoolError):
    """A recount disagrees with the books: a bug, found by `check()`."""


class ServerError(AtollError, RuntimeError):
    """The server cannot answer a request, through no fault of the request."""


class OverloadedError(ServerError):
    """Too many requests wait; nothing of this one was queued. `retry_after_s`: when to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ServerError):
    """The engine has died, or the server is stopping."""


class GenerationError(ServerError):
    """A request began, and went wrong; no other request is touched."""
