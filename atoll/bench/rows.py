"""Rows of results as JSON lines: what was measured, on what, with which versions. What was not measured is null."""

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, fields
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
    device_id: str | None = None  # of one GPU: those of one name differ in the rate of their memory


@dataclass
class DecodeRow:
    """One variant of one decode case. `roof_gbps` is the best read rate seen in the run so far: a run's roof is the largest of its rows."""

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
    run: str | None = None  # rows of one name were measured to be read together, maybe by several commands

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.time_us / 1e3 if self.time_us else None


def environment(device: torch.device, commit: str | None = None) -> Environment:
    """Of this process. `commit` defaults to the checkout's, with "-dirty" where files differ from it; None outside a checkout."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return Environment(name, commit or git_commit(), torch.__version__, triton.__version__, _device_id(device))


def _device_id(device: torch.device) -> str | None:
    """The beginning of a GPU's UUID, enough to tell those of one name apart; None where there is none to ask."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")[:8] if device.type == "cuda" else None


def append_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one line per row, all in one write: who is killed leaves all of them or none. Makes the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("ab", buffering=0) as file:
        file.write(lines.encode())


def read_decode_rows(path: Path) -> list[tuple[DecodeRow, Environment]]:
    """What `bench decode` wrote, by any version of it. Raises ConfigError for a file that cannot be read or a line that is no such row."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path} cannot be read: {error}; name a file that bench decode --out wrote") from error
    return [_read_row(line, f"{path} line {i}") for i, line in enumerate(lines, 1)]


def _read_row(line: str, where: str) -> tuple[DecodeRow, Environment]:
    try:
        found = json.loads(line)
        row, env = ({f.name: found[f.name] for f in fields(kind) if f.name in found} for kind in (DecodeRow, Environment))
        return DecodeRow(**row), Environment(**env)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where} is no row of bench decode: {error}; take the line out, or name another file") from error


def measured_cases(path: Path, run: str, env: Environment) -> frozenset[tuple[str, str | None]]:
    """The cases of a run that a file has, each with its L2 state. Raises ConfigError where they are of another commit or kind of device."""
    found = [(row, known) for row, known in read_decode_rows(path) if row.run == run]
    for _, known in found:
        if (known.device, known.commit) != (env.device, env.commit):
            raise ConfigError(
                f"run {run!r} in {path} is of commit {known.commit} on {known.device}, this is {env.commit} on {env.device}; give --run another name"
            )
    return frozenset((row.case, row.l2) for row, _ in found)


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
