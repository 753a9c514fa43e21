"""A worker for the connector of the tiers that holds values instead of bytes, ends what it is told in any order, and finds two writers of one slot."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from atoll.offload.base import BlobKind, Completion, Metadata, Span, Transfer
from atoll.offload.connector import TieredConnector
from atoll.offload.lru import Tier
from atoll.offload.moves import Move, MoveKind

PAGE_BYTES = 64
IMAGE_PAGES = 3


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def kv(number: int, page: int) -> Span:
    return Span(BlobKind.KV, digest(number), (page,))


def state(number: int, pages: Iterable[int]) -> Span:
    return Span(BlobKind.STATE, digest(number), tuple(pages))


def values_of(span: Span) -> list[tuple[str, bytes, int]]:
    """What the pages of a blob hold: its name and the part."""
    return [(span.kind.value, span.digest, part) for part in range(len(span.pages))]


def make_connector(num_host: int, num_disk: int = 0, *, is_mapped: bool = False, clock: Callable[[], float] = lambda: 0.0) -> TieredConnector:
    disk = Tier("disk", num_disk, PAGE_BYTES) if num_disk else None
    return TieredConnector(Tier("host", num_host, PAGE_BYTES), disk, is_mapped=is_mapped, timeout_s=10.0, clock=clock)


@dataclass
class FakeWorker:
    """Nothing has happened until `finish`; then it happens with what lies there at that time, as with the slowest of streams."""

    pool: dict[int, object] = field(default_factory=dict)
    host: dict[int, object] = field(default_factory=dict)
    disk: dict[int, object] = field(default_factory=dict)
    host_records: dict[int, object] = field(default_factory=dict)
    disk_records: dict[int, object] = field(default_factory=dict)
    in_flight: list[tuple[str, Transfer | Move]] = field(default_factory=list)

    def run(self, metadata: Metadata) -> None:
        for move in metadata.note or ():
            if move.kind is MoveKind.VOID:
                for slot in move.host_slots:
                    self.host_records.pop(slot, None)
                for slot in move.disk_slots:
                    self.disk_records.pop(slot, None)
            else:
                self.in_flight.append((move.kind.value, move))
        self.in_flight += [("load", load) for load in metadata.loads]
        self.in_flight += [("store", store) for store in metadata.stores]
        for slot in [slot for store in metadata.stores for slot in store.note]:
            assert slot not in self.host_records, f"host slot {slot} is written under a record"
        self.check_writers()

    def check_writers(self) -> None:
        """A slot that something in flight writes is in nothing else's hands."""
        reads: list[tuple[str, int]] = []
        writes: list[tuple[str, int]] = []
        for name, work in self.in_flight:
            host_slots = work.note if isinstance(work, Transfer) else work.host_slots
            (writes if name in ("store", "read") else reads).extend(("host", slot) for slot in host_slots)
            if isinstance(work, Move):
                (writes if name == "write" else reads).extend(("disk", slot) for slot in work.disk_slots)
        assert len(writes) == len(set(writes)), "two writers of one slot"
        assert not set(writes) & set(reads), "a reader of a slot that is being written"

    def finish(self, index: int = 0, fails: bool | Sequence[bool] = False) -> list[Completion]:
        name, work = self.in_flight.pop(index)
        if isinstance(work, Move):
            return [Completion(work.generation, (self._move(name, work, bool(fails)),), 0.0, 0, "made to fail" if fails else None)]
        slots, pages, arrived, at = work.note, work.pages, [], 0
        for i, span in enumerate(work.spans):
            part = range(at, at := at + len(span.pages))
            is_lost = fails if isinstance(fails, bool) else fails[i]
            for j in part:
                source, target = (self.host.get(slots[j]), self.pool) if name == "load" else (self.pool.get(pages[j]), self.host)
                target[pages[j] if name == "load" else slots[j]] = "garbage" if is_lost else source
            arrived.append(not is_lost)
        num_bytes = PAGE_BYTES * sum(len(span.pages) for span, ok in zip(work.spans, arrived, strict=True) if ok)
        return [Completion(work.generation, tuple(arrived), 0.25, num_bytes, None if all(arrived) else "made to fail")]

    def finish_all(self) -> list[Completion]:
        completions = []
        while self.in_flight:
            completions += self.finish()
        return completions

    def _move(self, name: str, move: Move, fails: bool) -> bool:
        names = [(move.blob_kind.value, move.digest, part) for part in range(len(move.host_slots))]
        for part, slot in enumerate(move.host_slots):
            if name == "read":
                record = self.disk_records.get(move.disk_slots[part])
                fails = fails or record != names[part]
                self.host[slot] = "garbage" if fails else self.disk[move.disk_slots[part]]
            elif name == "write":
                self.disk[move.disk_slots[part]] = "garbage" if fails else self.host[slot]
                self.disk_records[move.disk_slots[part]] = names[part]
                if fails:
                    del self.disk_records[move.disk_slots[part]]
            elif name == "record" and not fails:
                self.host_records[slot] = names[part]
        return not fails


def turn(connector: TieredConnector, worker: FakeWorker, fence: int = 0) -> list[Completion]:
    """Steps until nothing is left to do; what the engine is told."""
    told = []
    while connector.has_pending_work:
        worker.run(connector.build_metadata(fence, ()))
        told += connector.complete(worker.finish_all())
        connector.check()
    return told


def store(connector: TieredConnector, worker: FakeWorker, generation: int, spans: Sequence[Span]) -> Transfer | None:
    """Fill the pages with what the blobs are, and have them stored to the end."""
    for span in spans:
        worker.pool.update(zip(span.pages, values_of(span), strict=True))
    taken = connector.prepare_store(Transfer(generation, tuple(spans)))
    turn(connector, worker)
    return taken
