"""Figures of peers that were not in a run: measured before, on another machine, kept in a file of ours and never taken for the run's own."""

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError


@dataclass(frozen=True)
class PublishedPeer:
    """One kernel's figures."""

    name: str
    version: str
    time_us: dict[str, float]  # by case, warm L2
    rel_error: dict[str, float]  # by KV format, against fp32


@dataclass(frozen=True)
class Published:
    """The file's content."""

    measured_on: str
    peers: list[PublishedPeer]
    mask: str | None = None  # what masking costs elsewhere, as a sentence

    def times_us(self, case: str) -> dict[str, float]:
        return {peer.name: peer.time_us[case] for peer in self.peers if case in peer.time_us}


def read_published(path: Path) -> Published:
    """Raises ConfigError for a file that is not of this form."""
    try:
        found = json.loads(path.read_text())
        return Published(found["measured_on"], [PublishedPeer(**peer) for peer in found["peers"]], found["mask"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"file {path} has no published figures: {type(error).__name__} {error}; pass bench/published-h200.json") from error
