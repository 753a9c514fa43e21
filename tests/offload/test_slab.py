"""The file of the tiers: what was written is read back whole or is absent, and a file that does not fit is refused whole."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.offload import BlobKind
from atoll.offload.slab import Slab, StoredBlob, data_offset, num_slots_for_bytes

PAGE_BYTES = 512
IDENTITY: dict[str, str | int] = {"model_type": "demo", "weights": "aa", "page_bytes": PAGE_BYTES}
A, B = b"a" * 16, b"b" * 16


def open_slab(path: Path, **changes: int) -> Slab:
    return Slab(path, IDENTITY, changes.get("num_slots", 8), PAGE_BYTES)


def parts(*fills: int) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * PAGE_BYTES) for fill in fills]


def read(slab: Slab, kind: BlobKind, digest: bytes, slots: tuple[int, ...]) -> list[int] | None:
    """The first byte of each part; None: absent."""
    into = parts(*[0] * len(slots))
    return [part[0] for part in into] if slab.read(kind, digest, slots, into) else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.slab"


def test_blobs_come_back_after_the_file_was_closed(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    slab.write(BlobKind.STATE, A, (7, 0, 2), parts(2, 3, 4))
    slab.close()
    slab = open_slab(path)
    assert slab.stored() == [StoredBlob(BlobKind.STATE, A, (7, 0, 2)), StoredBlob(BlobKind.KV, A, (3,))]
    assert read(slab, BlobKind.STATE, A, (7, 0, 2)) == [2, 3, 4]
    assert read(slab, BlobKind.KV, A, (3,)) == [1]
    slab.close()


@pytest.mark.parametrize(("kind", "digest", "slots"), [(BlobKind.KV, B, (3,)), (BlobKind.STATE, A, (3,)), (BlobKind.KV, A, (4,)), (BlobKind.KV, A, (3, 4))])
def test_a_slot_is_read_as_what_its_record_says_only(path: Path, kind: BlobKind, digest: bytes, slots: tuple[int, ...]) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    assert read(slab, kind, digest, slots) is None
    slab.close()


def test_void_slots_are_absent(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.STATE, A, (0, 1), parts(1, 2))
    slab.void((1,))
    assert read(slab, BlobKind.STATE, A, (0, 1)) is None and slab.stored() == []
    slab.close()


def test_parts_of_two_stores_make_no_blob(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.STATE, A, (0, 1), parts(1, 2))
    slab.write(BlobKind.STATE, A, (2, 3), parts(1, 2))
    slab.void((1, 2))
    # Each part is good, and of another store than the other.
    assert slab.stored() == [] and read(slab, BlobKind.STATE, A, (0, 3)) is None
    slab.close()


def test_every_flipped_byte_of_a_record_or_a_slot_is_found(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    slab.close()
    offsets = [4096 + 3 * 64 + i for i in range(64)] + [data_offset(8) + 3 * PAGE_BYTES + i for i in range(0, PAGE_BYTES, 37)]
    whole = path.read_bytes()
    for offset in offsets:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        slab = open_slab(path)
        assert read(slab, BlobKind.KV, A, (3,)) is None, offset
        slab.close()


def test_a_flipped_byte_passes_without_checksums(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    with path.open("r+b") as file:
        file.seek(data_offset(8) + 3 * PAGE_BYTES)
        file.write(b"\7")
    assert read(slab, BlobKind.KV, A, (3,)) is None
    monkeypatch.setattr("atoll.offload.slab.xxh3_64_intdigest", lambda *_: 0)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    with path.open("r+b") as file:
        file.seek(data_offset(8) + 3 * PAGE_BYTES)
        file.write(b"\7")
    assert read(slab, BlobKind.KV, A, (3,)) == [7]
    slab.close()


def test_a_record_at_another_slots_place_is_void(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    slab.close()
    raw = bytearray(path.read_bytes())
    raw[4096 + 4 * 64 : 4096 + 5 * 64] = raw[4096 + 3 * 64 : 4096 + 4 * 64]
    raw[data_offset(8) + 4 * PAGE_BYTES : data_offset(8) + 5 * PAGE_BYTES] = bytes([1]) * PAGE_BYTES
    path.write_bytes(raw)
    slab = open_slab(path)
    assert [blob.slots for blob in slab.stored()] == [(3,)]
    slab.close()


class Cut(Exception):
    """The process ends here."""


def test_a_write_cut_off_at_any_call_is_whole_or_absent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes = Slab._write_bytes
    outcomes = set()
    for num_calls in range(12):
        path.unlink(missing_ok=True)
        slab = open_slab(path)
        slab.write(BlobKind.STATE, A, (0, 1, 2), parts(1, 2, 3))
        left = num_calls

        def cut(slab: Slab, offset: int, data: bytes | memoryview) -> None:
            nonlocal left
            if left == 0:
                # Half of it came through.
                write_bytes(slab, offset, memoryview(data)[: len(data) // 2])
                raise Cut
            left -= 1
            write_bytes(slab, offset, data)

        with monkeypatch.context() as patch:
            patch.setattr(Slab, "_write_bytes", cut)
            try:
                slab.write(BlobKind.STATE, B, (0, 1, 2), parts(4, 5, 6))
            except Cut:
                outcomes.add("cut")
        slab.close()
        slab = open_slab(path)
        found = {blob.digest: read(slab, blob.kind, blob.digest, blob.slots) for blob in slab.stored()}
        assert found in ({}, {A: None}, {A: [1, 2, 3]}, {B: [4, 5, 6]}, {B: None}), num_calls
        outcomes.update(found)
        slab.close()
    assert outcomes == {"cut", B}


def other_identity(path: Path) -> Slab:
    return Slab(path, {**IDENTITY, "weights": "bb", "page_size": 16}, 8, PAGE_BYTES)


def damage(path: Path, offset: int, data: bytes) -> Slab:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return open_slab(path)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (other_identity, r"another model, layout or format \(page_size None there, 16 here; weights 'aa' there, 'bb' here\); delete it to start anew"),
        (lambda path: open_slab(path, num_slots=9), "was made for 8 pages, the size given holds 9; give 12288B"),
        (lambda path: damage(path, 0, b"x"), "is no store of Atoll's"),
        (lambda path: damage(path, 8, b"\x63"), "has version 99, this is version 2"),
        (lambda path: damage(path, 40, b"x"), "has a damaged header; delete it"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_left_as_it_is(path: Path, again: Callable[[Path], Slab], message: str) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (3,), parts(1))
    slab.close()
    with pytest.raises(ConfigError, match=message):
        again(path)
    assert path.read_bytes()[data_offset(8) + 3 * PAGE_BYTES] == 1


def test_a_device_or_a_pipe_is_refused_and_left_as_it_is(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a device or a pipe; name a file"):
        open_slab(path)
    assert path.is_fifo()


def test_a_file_in_use_is_refused_until_it_is_closed(path: Path) -> None:
    slab = open_slab(path)
    memory, _ = slab.map()
    with pytest.raises(ConfigError, match="is in use by another engine"):
        open_slab(path)
    slab.close()
    slab.close()
    # The mapping is still there; the lock is not.
    open_slab(path).close()
    memory.close()


def test_a_file_that_was_being_made_is_completed(path: Path) -> None:
    slab = open_slab(path)
    size = slab.num_bytes
    slab.close()
    os.truncate(path, 4096)
    slab = open_slab(path)
    assert path.stat().st_size == size and slab.stored() == []
    slab.close()


def test_a_file_cut_short_while_it_is_open_reads_as_absent(path: Path) -> None:
    slab = open_slab(path)
    slab.write(BlobKind.KV, A, (7,), parts(1))
    os.truncate(path, data_offset(8))
    assert read(slab, BlobKind.KV, A, (7,)) is None
    slab.close()


def test_sizes_are_kept() -> None:
    for num_bytes in (0, 4096, 8192, 8703, 8704, 10**6, 10**6 + 511):
        num_slots = num_slots_for_bytes(num_bytes, PAGE_BYTES)
        assert num_slots == 0 or data_offset(num_slots) + num_slots * PAGE_BYTES <= num_bytes
        assert data_offset(num_slots + 1) + (num_slots + 1) * PAGE_BYTES > num_bytes or num_slots > 100
