"""One file of page-sized slots with a checksummed record for each, for the mapped host tier and the disk tier: what is read back is whole or absent.

::

    | header 4096 B | record 0 | record 1 | ... 64 B each, to a multiple of 4096 | slot 0 | slot 1 | ... page_bytes each |

The header says of which model, layout and format the pages are; a file of another is refused whole. A record names what lies in its slot: kind, digest, which
part of how many, the store's random id, so that parts of two stores never make one blob, and the checksum of the bytes; and it has a checksum of its own.
Order of a write: records voided, bytes, records. A process that is killed leaves its writes to the file in this order, since the kernel has them as each call
returns; what a power cut tears, and what memory that is mapped holds under a record of before, the checksums find. Knows no tier and no request.
"""

import fcntl
import json
import mmap
import os
import secrets
import stat
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from atoll.errors import ConfigError
from atoll.offload.base import BlobKind

VERSION = 2  # of this layout, and of how digests and fingerprints are made
_MAGIC = b"ATOLSLAB"
_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, bytes of the JSON text behind it, number of slots, checksum of all the rest
_RECORD = struct.Struct("<BxHHxxQ16sQ")  # kind, part, number of parts, store id, digest, checksum of the slot's bytes
_RECORD_BYTES = 64  # the fields, zeros, then the checksum of all before it in the last 8
_VOID = bytes(_RECORD_BYTES)
_KINDS = {BlobKind.KV: 1, BlobKind.STATE: 2}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob of which every part has a record."""

    kind: BlobKind
    digest: bytes
    slots: tuple[int, ...]  # of its parts in order


@dataclass(frozen=True, slots=True)
class _Record:
    kind: BlobKind
    digest: bytes
    part: int
    num_parts: int
    store_id: int
    checksum: int


def num_slots_for_bytes(num_bytes: int, page_bytes: int) -> int:
    """Slots of a file of at most `num_bytes`; may be 0."""
    num_slots = max(0, num_bytes - _HEADER_BYTES) // (page_bytes + _RECORD_BYTES)
    while num_slots and data_offset(num_slots) + num_slots * page_bytes > num_bytes:
        num_slots -= 1
    return num_slots


def data_offset(num_slots: int) -> int:
    """Where slot 0 begins."""
    return -(-(_HEADER_BYTES + num_slots * _RECORD_BYTES) // 4096) * 4096


class Slab:
    """An open file, locked against every other engine. Threads may use it at once, on different slots.

    `is_mapped`: its slots will be mapped memory, so their place on the disk is taken now; otherwise it grows as slots are written.
    Raises ConfigError for a file that is in use, damaged, of another identity or size, is no file, or cannot be made.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, str | int], num_slots: int, page_bytes: int, *, is_mapped: bool = False) -> None:
        self.path = Path(path)
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self._data_offset = data_offset(num_slots)
        self._file = self._open()
        is_new = os.fstat(self._file).st_size == 0
        try:
            self._prepare(dict(identity), is_mapped)
        except BaseException:
            if is_new:
                # Nothing of a store that could not be made stays behind.
                self.path.unlink(missing_ok=True)
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._data_offset + self.num_slots * self.page_bytes

    def map(self) -> tuple[mmap.mmap, int]:
        """The whole file as memory, and where its slots begin in it."""
        return mmap.mmap(self._file, self.num_bytes), self._data_offset

    def stored(self) -> list[StoredBlob]:
        """The blobs of which all parts have records. Their bytes are compared with the checksums when they are read."""
        table = self._read_bytes(_HEADER_BYTES, self.num_slots * _RECORD_BYTES)
        parts: dict[tuple[BlobKind, bytes, int, int], dict[int, int]] = defaultdict(dict)
        for slot in range(self.num_slots):
            raw = table[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES]
            if raw[0] and (record := _unpack(raw, slot)) is not None:
                parts[record.kind, record.digest, record.store_id, record.num_parts][record.part] = slot
        blobs: dict[tuple[BlobKind, bytes], StoredBlob] = {}
        for (kind, digest, _, num_parts), slots in parts.items():
            # A digest names the same bytes wherever they lie: one store of it is enough.
            if len(slots) == num_parts and (kind, digest) not in blobs:
                blobs[kind, digest] = StoredBlob(kind, digest, tuple(slots[part] for part in range(num_parts)))
        return list(blobs.values())

    def void(self, slots: Sequence[int]) -> None:
        """Nothing lies in these slots any more. Raises OSError."""
        for slot in slots:
            self._write_bytes(self._record_offset(slot), _VOID)

    def write(self, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Store a blob. Raises OSError; then it is absent."""
        self.void(slots)
        for slot, data in zip(slots, parts, strict=True):
            self._write_bytes(self._slot_offset(slot), data)
        self.record(kind, digest, slots, parts)

    def record(self, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Records for bytes that lie in the slots already. Raises OSError."""
        store_id = secrets.randbits(64)
        for part, (slot, data) in enumerate(zip(slots, parts, strict=True)):
            raw = _pack(_Record(kind, digest, part, len(slots), store_id, xxh3_64_intdigest(data)), slot)
            self._write_bytes(self._record_offset(slot), raw)

    def read(self, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Fill the parts; whether they are the blob's, whole and of one store. Raises OSError."""
        for slot, data in zip(slots, parts, strict=True):
            self._fill(data, self._slot_offset(slot))
        return self.verify(kind, digest, slots, parts)

    def verify(self, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Whether the parts are what the slots' records say, and those this blob's, all of one store. Raises OSError."""
        store_ids = set()
        for part, (slot, data) in enumerate(zip(slots, parts, strict=True)):
            record = _unpack(self._read_bytes(self._record_offset(slot), _RECORD_BYTES), slot)
            if record is None or (record.kind, record.digest, record.part, record.num_parts) != (kind, digest, part, len(slots)):
                return False
            if record.checksum != xxh3_64_intdigest(data):
                return False
            store_ids.add(record.store_id)
        return len(store_ids) == 1

    def close(self) -> None:
        """Unlock and close. May be called twice."""
        if self._file >= 0:
            # A mapping has a duplicate of the file, with which the lock would stay.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise ConfigError(f"offload file {self.path}: the folder {self.path.parent} does not exist; make it, or name another") from error
        except OSError as error:
            raise ConfigError(f"offload file {self.path} cannot be opened ({error.strerror}); name a file that this user may read and write") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ConfigError(f"offload file {self.path} is a device or a pipe; name a file, which is made where it is missing")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise ConfigError(f"offload file {self.path} is in use by another engine, 1 is the limit; end that one, or name another file") from error
        return file

    def _prepare(self, identity: dict[str, str | int], is_mapped: bool) -> None:
        size = os.fstat(self._file).st_size
        try:
            if size == 0:
                # First the header, then the size: a file that is cut off here is completed by the next to open it.
                self._write_bytes(0, _pack_header(identity, self.num_slots))
            else:
                self._check_header(identity)
            if size < self.num_bytes:
                os.ftruncate(self._file, self.num_bytes)
            if is_mapped:
                # Writing to a mapped page that the disk has no room for would end the process.
                os.posix_fallocate(self._file, 0, self.num_bytes)
        except OSError as error:
            raise ConfigError(
                f"offload file {self.path} of {self.num_bytes} bytes cannot be made ({error.strerror}); give a smaller size, or a file on another disk"
            ) from error

    def _check_header(self, identity: dict[str, str | int]) -> None:
        anew = "delete it to start anew, or name another file"
        raw = self._read_bytes(0, _HEADER_BYTES)
        if not raw.startswith(_MAGIC):
            raise ConfigError(f"offload file {self.path} is no store of Atoll's; name another file")
        _, version, num_json, num_slots, checksum = _HEADER.unpack_from(raw)
        if version != VERSION:
            raise ConfigError(f"offload file {self.path} has version {version}, this is version {VERSION}; {anew}")
        if checksum != _header_checksum(raw):
            raise ConfigError(f"offload file {self.path} has a damaged header; {anew}")
        found = json.loads(raw[_HEADER.size : _HEADER.size + num_json])
        differences = [
            f"{name} {found.get(name)!r} there, {identity.get(name)!r} here"
            for name in sorted(found.keys() | identity)
            if found.get(name) != identity.get(name)
        ]
        if differences:
            raise ConfigError(f"offload file {self.path} holds pages of another model, layout or format ({'; '.join(differences)}); {anew}")
        if num_slots != self.num_slots:
            size = data_offset(num_slots) + num_slots * self.page_bytes
            raise ConfigError(
                f"offload file {self.path} was made for {num_slots} pages, the size given holds {self.num_slots}; "
                f"give {size}B as its size, or delete it to start anew"
            )

    def _record_offset(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots
        return _HEADER_BYTES + slot * _RECORD_BYTES

    def _slot_offset(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots
        return self._data_offset + slot * self.page_bytes

    def _write_bytes(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, offset)
            left, offset = left[written:], offset + written

    def _read_bytes(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, data: memoryview, offset: int) -> None:
        while data:
            num_read = os.preadv(self._file, [data], offset)
            if num_read == 0:
                # Past the end of a file that somebody cut: nothing of ours lies there.
                data[:] = bytes(len(data))
                return
            data, offset = data[num_read:], offset + num_read


def _pack(record: _Record, slot: int) -> bytes:
    fields = _RECORD.pack(_KINDS[record.kind], record.part, record.num_parts, record.store_id, record.digest, record.checksum)
    fields = fields.ljust(_RECORD_BYTES - 8, b"\0")
    # The slot's number is the seed: a record that came to another slot's place is not one.
    return fields + xxh3_64_intdigest(fields, slot).to_bytes(8, "little")


def _unpack(raw: bytes, slot: int) -> _Record | None:
    """None for a void or damaged record."""
    kind = _KIND_OF.get(raw[0])
    if kind is None or xxh3_64_intdigest(raw[:-8], slot) != int.from_bytes(raw[-8:], "little"):
        return None
    _, part, num_parts, store_id, digest, checksum = _RECORD.unpack_from(raw)
    return _Record(kind, digest, part, num_parts, store_id, checksum)


def _pack_header(identity: Mapping[str, str | int], num_slots: int) -> bytes:
    text = json.dumps(identity, sort_keys=True).encode()
    assert _HEADER.size + len(text) <= _HEADER_BYTES
    raw = (_HEADER.pack(_MAGIC, VERSION, len(text), num_slots, 0) + text).ljust(_HEADER_BYTES, b"\0")
    return _HEADER.pack(_MAGIC, VERSION, len(text), num_slots, _header_checksum(raw)) + raw[_HEADER.size :]


def _header_checksum(raw: bytes) -> int:
    return xxh3_64_intdigest(raw[: _HEADER.size - 8] + raw[_HEADER.size :])
