"""Atoll serves language models from a paged pool in which a sequence's output depends only on the rows that it owns."""

import importlib
from typing import TYPE_CHECKING, Any

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
_LAZY = {
    "LLM": "atoll.engine.llm",
    "RequestOutput": "atoll.engine.output",
    "SamplingParams": "atoll.engine.sampling",
    "StreamPiece": "atoll.engine.output",
    "TokenLogprobs": "atoll.engine.output",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
