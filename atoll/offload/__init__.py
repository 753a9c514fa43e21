"""Offload: pages and states that leave the pool for other tiers and come back, through a connector protocol."""

from atoll.offload.base import BlobKind, Completion, Connector, ConnectorStats, Found, Metadata, Span, TierStats, Transfer

__all__ = ["BlobKind", "Completion", "Connector", "ConnectorStats", "Found", "Metadata", "Span", "TierStats", "Transfer"]
