"""Makes both sides of a connector of what the options say: opens the files, reads what they hold from before, wires books to threads; runs nothing."""

import importlib
import logging
from pathlib import Path

from atoll.errors import ConfigError, counted
from atoll.offload.base_worker import Offload, Regions
from atoll.offload.connector import TieredConnector
from atoll.offload.disk import FileThreads
from atoll.offload.host_pages import HostPages
from atoll.offload.identity import StoreIdentity
from atoll.offload.lru import Tier
from atoll.offload.options import DiskOptions, HostOptions, OffloadOptions, parse_offload
from atoll.offload.slab import Slab, num_slots_for_bytes
from atoll.offload.worker import TierWorker

log = logging.getLogger(__name__)

_DISK_FILE = "atoll-offload.slab"  # in a folder that the options name


def make_offload(options: str | OffloadOptions, identity: StoreIdentity, regions: Regions, timeout_s: float = 30.0) -> Offload:
    """`timeout_s`: that a load waits for a disk.

    Raises ConfigError for options that are none, sizes that hold no page, and files that do not fit or cannot be had.
    """
    parsed = parse_offload(options) if isinstance(options, str) else options
    if parsed.lmcache is not None:
        # An extra: what it needs may not be installed, and it says so itself.
        return importlib.import_module("atoll.offload.lmcache").make_lmcache(parsed.lmcache, identity.namespace, regions.device)
    assert parsed.host is not None
    opened: list[Slab] = []
    try:
        host_slab = _open_host(parsed.host, identity, opened)
        disk_slab = _open_disk(parsed.disk, identity, opened) if parsed.disk is not None else None
        return _wire(parsed.host, host_slab, disk_slab, identity.page_bytes, timeout_s)
    except BaseException:
        for slab in opened:
            slab.close()
        raise


def _wire(options: HostOptions, host_slab: Slab | None, disk_slab: Slab | None, page_bytes: int, timeout_s: float) -> Offload:
    if host_slab is None:
        num_host_pages = options.num_bytes // page_bytes
        pages = HostPages.anonymous(num_host_pages, page_bytes)
    else:
        num_host_pages = host_slab.num_slots
        memory, offset = host_slab.map()
        pages = HostPages(memory, offset, num_host_pages, page_bytes)
    host = Tier("host", num_host_pages, page_bytes)
    _adopt(host, host_slab, is_verified=False)
    disk = None
    if disk_slab is not None:
        disk = Tier("disk", disk_slab.num_slots, page_bytes)
        # Compared with its checksum at every read.
        _adopt(disk, disk_slab, is_verified=True)
    files = FileThreads(pages, host_slab, disk_slab) if host_slab is not None or disk_slab is not None else None
    return Offload(TieredConnector(host, disk, is_mapped=host_slab is not None, timeout_s=timeout_s), TierWorker(pages, files))


def _adopt(tier: Tier, slab: Slab | None, *, is_verified: bool) -> None:
    if slab is not None:
        for blob in slab.stored():
            tier.adopt((blob.kind, blob.digest), blob.slots, is_verified=is_verified)
        tier.free_rest()
        log.info("offload file %s: %s of %d pages in all from before", slab.path, counted(len(tier), "blob"), tier.stats().used_bytes // tier.page_bytes)


def _open_host(options: HostOptions, identity: StoreIdentity, opened: list[Slab]) -> Slab | None:
    if options.path is None:
        _check_holds(options.num_bytes // identity.page_bytes, "host", options.num_bytes, identity)
        return None
    slab = _open(Path(options.path).expanduser(), "host", options.num_bytes, identity, is_mapped=True)
    opened.append(slab)
    return slab


def _open_disk(options: DiskOptions, identity: StoreIdentity, opened: list[Slab]) -> Slab:
    path = Path(options.path).expanduser()
    if options.path.endswith("/") or path.is_dir():
        path = path / _DISK_FILE
    slab = _open(path, "disk", options.num_bytes, identity, is_mapped=False)
    opened.append(slab)
    return slab


def _open(path: Path, tier: str, num_bytes: int, identity: StoreIdentity, *, is_mapped: bool) -> Slab:
    num_slots = num_slots_for_bytes(num_bytes, identity.page_bytes)
    _check_holds(num_slots, tier, num_bytes, identity)
    return Slab(path, identity.as_dict(), num_slots, identity.page_bytes, is_mapped=is_mapped)


def _check_holds(num_slots: int, tier: str, num_bytes: int, identity: StoreIdentity) -> None:
    least = max(1, identity.image_pages)
    if num_slots < least:
        what = "a page" if least == 1 else f"a state of {least} pages"
        need = (least + 1) * (identity.page_bytes + 64) + 8192
        raise ConfigError(
            f"the {tier} tier of {num_bytes} bytes holds {num_slots} pages of {identity.page_bytes} bytes, less than {what}; give {need}B or more"
        )
