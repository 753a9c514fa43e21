"""Moves of the tiers: what the scheduler side asks of files beside the pool's transfers, as plain data in Metadata.note; knows no tensor and no file."""

from dataclasses import dataclass
from enum import StrEnum

from atoll.offload.base import BlobKind


class MoveKind(StrEnum):
    """What is done with one blob, or for VOID with slots."""

    READ = "read"  # disk slots to host slots, checksums compared
    WRITE = "write"  # host slots to disk slots, then their records
    RECORD = "record"  # checksums and records of host slots in the mapped file; the bytes are there
    VERIFY = "verify"  # bytes of host slots in the mapped file against their records, once after a restart
    VOID = "void"  # records of host slots (mapped file) and of disk slots, before whatever is recorded there next; never completed


@dataclass(frozen=True, slots=True)
class Move:
    """One blob between tiers, or within one. Ends in one completion with one entry in `arrived`, but for VOID."""

    generation: int  # below 0; 0 for VOID
    kind: MoveKind
    host_slots: tuple[int, ...] = ()  # the blob's parts in order
    disk_slots: tuple[int, ...] = ()
    blob_kind: BlobKind = BlobKind.KV
    digest: bytes = b""
