"""Offload: pages and states that leave the pool for other tiers and come back, through a connector protocol."""

import importlib
from typing import TYPE_CHECKING, Any

from atoll.offload.base import BlobKind, Completion, Connector, ConnectorStats, Found, Metadata, Span, TierStats, Transfer

if TYPE_CHECKING:
    from atoll.offload.build import make_offload

__all__ = ["BlobKind", "Completion", "Connector", "ConnectorStats", "Found", "Metadata", "Span", "TierStats", "Transfer", "make_offload"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the scheduler's side runs without torch.
    if name != "make_offload":
        raise AttributeError(f"module 'atoll.offload' has no attribute {name!r}")
    return importlib.import_module("atoll.offload.build").make_offload
