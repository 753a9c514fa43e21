"""Offload: pages and states that leave the pool for other tiers and come back, through a connector protocol."""

from typing import TYPE_CHECKING

from atoll.lazy import imported_on_use
from atoll.offload.base import BlobKind, Completion, Connector, ConnectorStats, Found, Metadata, Span, TierStats, Transfer

if TYPE_CHECKING:
    from atoll.offload.build import make_offload

__all__ = ["BlobKind", "Completion", "Connector", "ConnectorStats", "Found", "Metadata", "Span", "TierStats", "Transfer", "make_offload"]


# The scheduler's side runs without torch.
__getattr__ = imported_on_use(__name__, {"make_offload": "atoll.offload.build"})
