"""Atoll serves language models from a paged pool in which a sequence's output depends only on the rows that it owns."""

from typing import TYPE_CHECKING

from atoll.errors import (
    AtollError,
    BackendError,
    ConfigError,
    ModelError,
    OutOfPagesError,
    OutOfSlotsError,
    PoolCorruptError,
    PoolError,
    RequestError,
    SpecError,
)
from atoll.lazy import imported_on_use

if TYPE_CHECKING:
    from atoll.engine.llm import LLM
    from atoll.engine.output import RequestOutput, StreamPiece, TokenLogprobs
    from atoll.engine.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AtollError",
    "BackendError",
    "ConfigError",
    "ModelError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PoolCorruptError",
    "PoolError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecError",
    "StreamPiece",
    "TokenLogprobs",
    "__version__",
]

# Loaded on first use, so that `import atoll` does not import torch.
__getattr__ = imported_on_use(
    __name__,
    {
        "LLM": "atoll.engine.llm",
        "RequestOutput": "atoll.engine.output",
        "SamplingParams": "atoll.engine.sampling",
        "StreamPiece": "atoll.engine.output",
        "TokenLogprobs": "atoll.engine.output",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
