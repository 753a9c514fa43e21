"""What `EngineConfig.offload` says, as tiers with sizes; knows no file and no tensor."""

import re
from dataclasses import dataclass

from atoll.errors import ConfigError

DEFAULT_HOST_BYTES = 2**30  # in front of a disk tier, where no host part is given
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FORMS = "host:8GiB, host:FILE:8GiB, disk:PATH:100GiB, lmcache or lmcache:FILE, comma-separated"


@dataclass(frozen=True)
class HostOptions:
    """The tier in host memory."""

    num_bytes: int = DEFAULT_HOST_BYTES
    path: str | None = None  # of a mapped file, which survives a restart; None: memory of this process


@dataclass(frozen=True)
class DiskOptions:
    """The tier behind it."""

    path: str  # a file, made where it is missing, or a folder for one
    num_bytes: int


@dataclass(frozen=True)
class OffloadOptions:
    """Either tiers of our own, the host tier always among them, or LMCache."""

    host: HostOptions | None = None
    disk: DiskOptions | None = None
    lmcache: str | None = None  # path of its configuration; empty: its defaults


def parse_offload(text: str) -> OffloadOptions:
    """Raises ConfigError for a part that is unknown, twice there, or of no size."""
    host: HostOptions | None = None
    disk: DiskOptions | None = None
    lmcache: str | None = None
    seen: set[str] = set()
    for part in text.split(","):
        kind, colon, rest = part.strip().partition(":")
        if kind in seen:
            raise ConfigError(f"offload {text!r} has two parts {kind!r}, one is the limit; leave one out")
        seen.add(kind)
        if kind == "host":
            path, _, size = rest.rpartition(":")
            host = HostOptions(parse_bytes(size, part), path or None)
        elif kind == "disk":
            path, _, size = rest.rpartition(":")
            if not path:
                raise ConfigError(f"offload part {part!r} lacks a path or a size; give disk:PATH:SIZE, for example disk:/var/cache/atoll:100GiB")
            disk = DiskOptions(path, parse_bytes(size, part))
        elif kind == "lmcache":
            if colon and not rest:
                raise ConfigError(f"offload part {part!r} names no file; give lmcache:FILE, with LMCache's configuration in it, or lmcache for its defaults")
            lmcache = rest
        else:
            raise ConfigError(f"offload part {part!r} is unknown; use {_FORMS}")
    if lmcache is not None and len(seen) > 1:
        raise ConfigError(f"offload {text!r} has tiers beside LMCache, which brings its own; give one or the other")
    if lmcache is None and host is None:
        host = HostOptions()
    return OffloadOptions(host, disk, lmcache)


def parse_bytes(size: str, part: str) -> int:
    """`8GiB`, `1.5TB`, `4096B`: bytes. `part` is for the message."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]+)", size.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"offload part {part!r} ends in {size!r}, which is no size; give a number with B, KB, KiB, MB, MiB, GB, GiB, TB or TiB, such as 8GiB")
    num_bytes = int(float(match.group(1)) * unit)
    if num_bytes < 1:
        raise ConfigError(f"offload part {part!r} has a size of {num_bytes} bytes; give 1 or more, such as 8GiB")
    return num_bytes
