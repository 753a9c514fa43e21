"""Faults of files and threads under the whole stack of the tiers: every one ends as data, as a shorter prefix or a clear error, and nothing is left behind."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from atoll.errors import ConfigError
from atoll.offload import BlobKind, Completion, Span, Transfer, make_offload
from atoll.offload.base_worker import Fence, Offload, Regions
from atoll.offload.disk import FileThreads
from atoll.offload.identity import StoreIdentity
from atoll.offload.slab import Slab, data_offset
from tests.offload.tier_kit import digest, kv, state

PAGE_BYTES = 4096
NUM_POOL_PAGES = 64
IDENTITY = StoreIdentity("faults", "", "aa", "", "bfloat16", "cpu", PAGE_BYTES, 16, "bf16", "plain", 1, 1, 64, 3 * PAGE_BYTES, 3)


class Stack:
    """Both sides on the CPU, as an engine would drive them."""

    def __init__(self, options: str, identity: StoreIdentity = IDENTITY) -> None:
        self.regions = Regions(torch.zeros((NUM_POOL_PAGES, PAGE_BYTES), dtype=torch.uint8), 3)
        self.offload: Offload = make_offload(options, identity, self.regions)
        self.offload.worker.register(self.regions)
        self.generation = 0

    def steps(self) -> list[Completion]:
        """Steps until nothing is pending."""
        told: list[Completion] = []
        for _ in range(20_000):
            if not self.offload.connector.has_pending_work:
                self.offload.connector.check()  # type: ignore[attr-defined]
                return told
            metadata = self.offload.connector.build_metadata(0, ())
            if metadata.moves:
                self.offload.worker.run(metadata, Fence(0))
            self.offload.worker.wait(0.01)
            told += self.offload.connector.complete(self.offload.worker.poll())
        raise AssertionError("work is pending for ever")

    def store(self, *spans: Span) -> Completion | None:
        """What is stored says what it is: the digest's last byte, plus 100 for a state."""
        for span in spans:
            for page in span.pages:
                self.regions.pages[page] = span.digest[-1] + 100 * (span.kind is BlobKind.STATE)
        self.generation += 1
        if self.offload.connector.prepare_store(Transfer(self.generation, spans)) is None:
            return None
        (told,) = self.steps()
        return told

    def load(self, *spans: Span) -> Completion | None:
        self.generation += 1
        for span in spans:
            for page in span.pages:
                self.regions.pages[page] = 255
        if not self.offload.connector.after_allocation(Transfer(self.generation, spans)):
            return None
        (told,) = self.steps()
        for span, has_come in zip(spans, told.arrived, strict=True):
            if has_come:
                # Whatever else a fault does, it does not bring wrong bytes.
                assert bool((self.regions.pages[list(span.pages)] == span.digest[-1] + 100 * (span.kind is BlobKind.STATE)).all())
        return told

    def close(self) -> None:
        self.offload.worker.close(5.0)


@contextmanager
def stack(options: str, identity: StoreIdentity = IDENTITY) -> Iterator[Stack]:
    made = Stack(options, identity)
    try:
        yield made
    finally:
        made.close()


def num_found(made: Stack, *numbers: int) -> int:
    return sum(made.offload.connector.lookup([digest(n)], 0).num_pages for n in numbers)


def num_slots(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:24], "little")


def corrupt(path: Path, fill: int) -> int:
    """Flip a byte in every slot that is full of `fill`; how many."""
    count, raw = 0, bytearray(path.read_bytes())
    start = data_offset(num_slots(path))
    for offset in range(start, len(raw), PAGE_BYTES):
        if raw[offset : offset + PAGE_BYTES] == bytes([fill]) * PAGE_BYTES:
            with path.open("r+b") as file:
                file.seek(offset + 1234)
                file.write(bytes([fill ^ 1]))
            count += 1
    return count


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blobs_survive_a_restart(tmp_path: Path, tier: str) -> None:
    options = f"{tier}:{tmp_path}/store:256KiB"
    with stack(options) as made:
        assert made.store(kv(1, 1), kv(2, 2), state(2, (3, 4, 5))) is not None
    with stack(options) as made:
        assert made.offload.connector.lookup([digest(1), digest(2)], 0).states == {2}
        told = made.load(kv(1, 11), kv(2, 12), state(2, (13, 14, 15)))
        assert told is not None and told.ok


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("fill", [2, 102])
def test_corrupt_bytes_are_a_shorter_prefix(tmp_path: Path, tier: str, fill: int) -> None:
    options = f"{tier}:{tmp_path}/store:256KiB"
    with stack(options) as made:
        made.store(kv(1, 1), kv(2, 2), state(2, (3, 4, 5)))
    assert corrupt(tmp_path / "store", fill) == (1 if fill == 2 else 3)
    with stack(options) as made:
        told = made.load(kv(1, 11), kv(2, 12), state(2, (13, 14, 15)))
        assert told is not None and told.arrived == ((True, False, True) if fill == 2 else (True, True, False))
        assert "are not those that were written" in str(told.error)
        # It is not offered again, can be stored again, and comes back then.
        assert num_found(made, 1) == 1 and num_found(made, 2) == (0 if fill == 2 else 1)
        assert made.offload.connector.lookup([digest(1), digest(2)], 2).states == (frozenset({2}) if fill == 2 else frozenset())
        made.store(kv(2, 2), state(2, (3, 4, 5)))
        told = made.load(kv(1, 11), kv(2, 12), state(2, (13, 14, 15)))
        assert told is not None and told.ok


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_corrupt_bytes_reach_the_pool_where_nobody_compares(tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "verify", lambda *_: True)
    options = f"{tier}:{tmp_path}/store:256KiB"
    with stack(options) as made:
        made.store(kv(1, 1))
    corrupt(tmp_path / "store", 1)
    with stack(options) as made, pytest.raises(AssertionError):
        made.load(kv(1, 11))


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    options = f"host:{tmp_path}/host:256KiB,disk:{tmp_path}/disk:256KiB"
    with stack(options) as made:
        made.store(kv(1, 1))
    other = StoreIdentity(**{**IDENTITY.as_dict(), "weights": "bb"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights 'aa' there, 'bb' here"):
        Stack(options, other)
    # Nothing was locked or lost by the refusal.
    with stack(options) as made:
        assert num_found(made, 1) == 1


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows past it, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_no_transfer_and_the_tier_goes_on_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with stack(f"host:128KiB,disk:{path}:256KiB") as made:
        # The file has its size from the start, and holes: the disk fills as they are written.
        os.truncate(path, data_offset(num_slots(path)))
        with file_size_limit(data_offset(num_slots(path)) + 3 * PAGE_BYTES):
            for n in range(1, 7):
                told = made.store(kv(n, n))
                assert told is not None and told.ok
            host, disk = made.offload.connector.stats.tiers
            assert disk.num_failures > 0 and disk.capacity_bytes == 3 * PAGE_BYTES and host.num_failures == 0
            # The three slots that there are are used again and again.
            for n in range(7, 60):
                assert made.store(kv(n, 1)) is not None
            assert made.offload.connector.stats.tiers[1].num_failures == disk.num_failures
            assert made.offload.connector.stats.tiers[1].num_blobs == 3
    with stack(f"host:128KiB,disk:{path}:256KiB") as made:
        assert num_found(made, 57, 58, 59) == 3
        for n in (57, 58, 59):
            told = made.load(kv(n, 1))
            assert told is not None and told.ok


def test_a_mapped_file_that_the_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(ConfigError, match=r"of \d+ bytes cannot be made \(File too large\); give a smaller size"):
        Stack(f"host:{tmp_path}/host:1MiB")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_missing_folder_is_refused(tmp_path: Path, tier: str) -> None:
    with pytest.raises(ConfigError, match=r"the folder .*gone does not exist; make it"):
        Stack(f"{tier}:{tmp_path}/gone/store:1MiB")


def test_a_file_that_is_deleted_while_it_is_used_serves_on(tmp_path: Path) -> None:
    with stack(f"host:16KiB,disk:{tmp_path}/disk:256KiB") as made:
        made.store(kv(1, 1))
        (tmp_path / "disk").unlink()
        for n in range(2, 8):
            made.store(kv(n, n))
        assert made.offload.connector.lookup([digest(1)], 0).num_pages == 1
        told = made.load(kv(1, 11))
        assert told is not None and told.ok


def test_sizes_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="the host tier of 8192 bytes holds 2 pages of 4096 bytes, less than a state of 3 pages"):
        Stack("host:8192B")


@pytest.mark.parametrize("slab_method", ["read", "write"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_noticed_and_all_of_it_fails_as_data(tmp_path: Path, slab_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stack(f"host:16KiB,disk:{tmp_path}/disk:256KiB") as made:
        for n in range(1, 9):
            assert made.store(kv(n, n)) is not None
        files: FileThreads = made.offload.worker._files  # type: ignore[attr-defined]
        assert files.alive

        def die(*_: object) -> None:
            raise RuntimeError("a bug in a thread")

        monkeypatch.setattr(Slab, slab_method, die)
        if slab_method == "read":
            told = made.load(kv(1, 11), kv(2, 12))
            assert told is not None and told.arrived == (False, False) and "died" in str(told.error)
        else:
            told = made.store(kv(9, 9))
            assert told is not None and told.ok
        monkeypatch.undo()
        assert not files.alive
        # The host tier serves on; the disk fails, and nobody waits for it.
        for n in range(10, 20):
            told = made.store(kv(n, 1))
            assert told is not None and told.ok
            told = made.load(kv(n, 2))
            assert told is not None and told.ok
        for n in range(1, 9):
            told = made.load(kv(n, 3))
            assert told is None or not told.ok
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("atoll-offload")]


def test_a_worker_that_fails_a_transfer_leaves_a_shorter_prefix() -> None:
    with stack("host:128KiB") as made:
        connector = made.offload.connector
        made.store(kv(1, 1), kv(2, 2))
        assert connector.after_allocation(Transfer(90, (kv(1, 11), kv(2, 12))))
        connector.build_metadata(0, ())
        assert connector.complete([Completion(90, (True, False), error="half a load")]) == [Completion(90, (True, False), error="half a load")]
        # What could not be read is not offered again.
        assert num_found(made, 1) == 1 and num_found(made, 2) == 0
        assert connector.prepare_store(Transfer(91, (kv(3, 3), kv(4, 4)))) is not None
        connector.build_metadata(0, ())
        connector.complete([Completion(91, (False, True), error="half a store")])
        assert num_found(made, 3) == 0 and num_found(made, 4) == 1
        stats = connector.stats
        assert (stats.num_load_failures, stats.num_store_failures, stats.tiers[0].num_failures) == (1, 1, 2)
