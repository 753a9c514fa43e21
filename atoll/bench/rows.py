"""Rows of results as JSON lines: what was measured, on what, with which versions. What was not measured is null."""

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from atoll.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """Where a row was measured."""

    device: str
    commit: str | None
    torch: str
    triton: str


@dataclass
class DecodeRow:
    """One variant of one decode case. `roof_gbps` is the best read rate seen in the whole run, so it is set when the run ends."""

    case: str
    batch: int
    ctx: int  # tokens
    backend: str  # a backend's name, or an adapter's module:function
    mask_unowned_kv: bool | None  # None: an adapter does as it does
    repeat: int  # 1: the same variant measured a second time, which shows the noise
    l2: str | None  # warm, cold; None on a CPU
    bytes: int
    flops: int
    time_us: float | None = None
    spread: float | None = None  # (longest - shortest) / median of the rounds
    rel_error: float | None = None  # against the fp32 reference
    roof_gbps: float | None = None  # 10^9 bytes/s
    config: str | None = None  # the plan's tuning
    page_order: str = "shuffled"  # how the page table names pages; in_order: neighbours, as in a fresh pool
    note: str | None = None  # why a time is missing

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.time_us / 1e3 if self.time_us else None


def environment(device: torch.device, commit: str | None = None) -> Environment:
    """Of this process. `commit` defaults to the checkout's, with "-dirty" where files differ from it; None outside a checkout."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return Environment(name, commit or git_commit(), torch.__version__, triton.__version__)


def append_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one line per row; makes the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def check_writable(path: Path) -> None:
    """Raise ConfigError now rather than after a long run; makes the file and its folder where they are missing."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}; name a file in a folder that you may write to") from error


def git_commit() -> str | None:
    """The checkout's, with "-dirty" where files differ from it; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
