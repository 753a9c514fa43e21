"""The scheduler side of the tiers: host memory, and a disk behind it; decides what lies where, and moves no byte itself.

A store goes to host slots; when it has arrived its blobs can be found, and follow to the disk and into the mapped file's records, if there are such. A load
comes from host slots; blobs that only the disk has are read into host slots first, and blobs of a mapped file are verified once after a restart, so such a
load is handed to the worker in a later step than it was accepted. Whatever is in flight holds a pin on its blobs, so that no slot has two writers.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from atoll.offload.base import BlobKind, Completion, ConnectorStats, Found, Metadata, Span, Transfer
from atoll.offload.in_flight import FileMove, Load, Store
from atoll.offload.lru import Blob, Key, Tier
from atoll.offload.moves import Move, MoveKind
from atoll.offload.suspicion import Suspicion

# One in so many of the host tier's slots is held for the disk's writes at most: the rest stays free for what is stored next. What is evicted before its turn
# is not written.
_BACKLOG_SHARE = 4


class TieredConnector:
    """See `atoll.offload.base.Connector`. `host` and `disk` are their tiers' books, with what files held from before adopted."""

    def __init__(
        self,
        host: Tier,
        disk: Tier | None = None,
        *,
        is_mapped: bool = False,
        timeout_s: float = 30.0,  # that a load waits for the disk
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.disk = disk
        self._suspicion = Suspicion(timeout_s, clock)  # of the disk
        self._is_mapped = is_mapped
        self._recorded = {slot for key in host.keys if (blob := host.get(key)) for slot in blob.slots} if is_mapped else set()
        self._loads: dict[int, Load] = {}
        self._stores: dict[int, Store] = {}
        self._moves: dict[int, FileMove] = {}
        self._queue: list[Move] = []  # for the next metadata, in order
        self._ended: list[Completion] = []  # loads of which nothing was left to load
        self._num_writing = 0  # host slots on their way to the disk
        self._unsaved: deque[Key] = deque()  # blobs of the host tier that wait for that
        self._next_move = -1
        self._stats = ConnectorStats()

    def lookup(self, digests: Sequence[bytes], first: int) -> Found:
        # A load holds all of its blobs in the host tier at once: no more is promised than it has room for.
        room, num_pages, states = self.host.num_available, 0, set()
        for number, digest in enumerate(digests, 1):
            if number > first:
                num_slots = self._slots_to_hold((BlobKind.KV, digest))
                # A state behind a page that is missing is of no use.
                if num_slots is None or num_slots > room:
                    break
                room -= num_slots
                num_pages += 1
            num_slots = self._slots_to_hold((BlobKind.STATE, digest))
            if num_slots is not None and num_slots <= room:
                states.add(number)
        self._touch(digests[: first + num_pages])
        return Found(num_pages, frozenset(states))

    def after_allocation(self, load: Transfer) -> bool:
        # What is here is held before room is made for the rest; states first, since a hybrid model has no use for pages alone.
        blobs = [self._hold(span) for span in load.spans]
        for i in sorted(range(len(blobs)), key=lambda i: load.spans[i].kind is BlobKind.KV):
            if blobs[i] is None:
                blobs[i] = self._promote(load.spans[i])
        held = [blob for blob in blobs if blob is not None]
        if not held or any(blob is None and span.kind is BlobKind.STATE for blob, span in zip(blobs, load.spans, strict=True)):
            self._unpin(held)
            return False
        for blob in held:
            if not blob.is_verified and blob.move is None:
                blob.move = self._start(MoveKind.VERIFY, blob)
        waits_for = {blob.move for blob in held if blob.move is not None}
        error = None if len(held) == len(blobs) else "a blob is gone, or the host tier has no room for it"
        self._loads[load.generation] = Load(load, blobs, waits_for, error=error)
        return True

    def prepare_store(self, store: Transfer) -> Transfer | None:
        spans: list[Span] = []
        blobs: list[Blob] = []
        held: list[Blob] = []
        # What is offered may be one chain: its end gives way to its beginning, and never the other way round.
        self._touch([*dict.fromkeys(span.digest for span in store.spans)])
        for span in store.spans:
            key = _key(span)
            here = self.host.get(key)
            if here is not None:
                self.host.pin(here)
                held.append(here)
            elif self._on_disk(key) is None and (blob := self._reserve_host(key, len(span.pages))) is not None:
                spans.append(span)
                blobs.append(blob)
        self._unpin(held)
        if not spans:
            return None
        taken = replace(store, spans=tuple(spans), note=tuple(slot for blob in blobs for slot in blob.slots))
        self._stores[store.generation] = Store(taken, blobs)
        return taken

    def build_metadata(self, fence: int, clears: Sequence[int]) -> Metadata:
        loads = tuple(self._send_load(load) for load in self._loads.values() if not load.is_sent and not load.waits_for)
        stores = tuple(store.transfer for store in self._stores.values() if not store.is_sent)
        for store in self._stores.values():
            store.is_sent = True
        moves, self._queue = tuple(self._queue), []
        return Metadata(fence, tuple(clears), loads, stores, moves or None)

    def complete(self, completions: Sequence[Completion]) -> list[Completion]:
        for completion in completions:
            if completion.generation in self._moves:
                self._end_move(self._moves.pop(completion.generation), completion)
            elif (load := self._loads.get(completion.generation)) is not None and load.is_sent:
                self._end_load(self._loads.pop(completion.generation), completion)
            elif (store := self._stores.get(completion.generation)) is not None and store.is_sent:
                self._end_store(self._stores.pop(completion.generation), completion)
        if self._suspicion.has_late_reads():
            self._give_up_reads()
        ended, self._ended = self._ended, []
        return ended

    def request_finished(self, digests: Sequence[bytes], generations: Sequence[int]) -> bool:
        self._touch(digests)
        return any(generation in self._stores for generation in generations)

    def cancel(self, generation: int) -> bool:
        load, store = self._loads.get(generation), self._stores.get(generation)
        if load is not None and not load.is_sent:
            # Moves that were started for it go on, with pins of their own.
            self._unpin(blob for blob in self._loads.pop(generation).blobs if blob is not None)
            return True
        if store is not None and not store.is_sent:
            for blob in self._stores.pop(generation).blobs:
                self.host.drop(blob)
                self.host.unpin(blob)
            return True
        # Of a generation that is not known nothing is in flight.
        return load is None and store is None

    def forget(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            for kind in BlobKind:
                self._forget((kind, digest))

    @property
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores or self._moves or self._queue or self._ended)

    def reset(self) -> None:
        # Moves between the tiers do not count: what they are about is dropped when they end.
        transfers = [load.transfer for load in self._loads.values()] + [store.transfer for store in self._stores.values()]
        in_flight = {_key(span) for transfer in transfers for span in transfer.spans}
        for key in dict.fromkeys(key for tier in self._tiers for key in tier.keys):
            if key not in in_flight:
                self._forget(key)

    @property
    def stats(self) -> ConnectorStats:
        tiers = [self.host.stats()]
        if self.disk is not None:
            tiers.append(replace(self.disk.stats(), is_suspect=self._suspicion.is_suspect))
        return replace(self._stats, tiers=tuple(tiers))

    def check(self) -> None:
        """Recount both tiers' books. AssertionError where they disagree."""
        moves = self._moves.values()
        of_host = [blob for load in self._loads.values() for blob in load.blobs if blob is not None]
        of_host += [blob for store in self._stores.values() for blob in store.blobs] + [move.host for move in moves]
        self.host.check(blob for blob in of_host if blob.is_dropped)
        if self.disk is not None:
            self.disk.check(move.disk for move in moves if move.disk is not None and move.disk.is_dropped)

    @property
    def _tiers(self) -> list[Tier]:
        return [self.host] if self.disk is None else [self.host, self.disk]

    def _slots_to_hold(self, key: Key) -> int | None:
        """Host slots that a load of this blob would hold and nothing holds yet; None: it is not to be had."""
        blob = self.host.get(key)
        if blob is None:
            stored = self._on_disk(key)
            return len(stored.slots) if stored is not None else None
        if not blob.is_coming:
            return None
        return len(blob.slots) if blob.num_pins == 0 else 0

    def _on_disk(self, key: Key) -> Blob | None:
        """A blob that the disk has, and may be asked for."""
        return self._stored(key) if self._suspicion.may_ask else None

    def _stored(self, key: Key) -> Blob | None:
        blob = self.disk.get(key) if self.disk is not None else None
        return blob if blob is not None and blob.is_whole else None

    def _touch(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):
            for tier in self._tiers:
                tier.touch((BlobKind.STATE, digest))
                tier.touch((BlobKind.KV, digest))

    def _hold(self, span: Span) -> Blob | None:
        """A blob of the host tier, pinned, if it is there or on its way from the disk."""
        blob = self.host.get(_key(span))
        if blob is None or not blob.is_coming or len(blob.slots) != len(span.pages):
            return None
        self.host.pin(blob)
        return blob

    def _promote(self, span: Span) -> Blob | None:
        """Have a blob that only the disk has read into host slots; pinned for the caller."""
        key, stored = _key(span), self._stored(_key(span))
        if self.disk is None or stored is None or key in self.host or len(stored.slots) != len(span.pages):
            return None
        blob = self._reserve_host(key, len(stored.slots))
        if blob is not None:
            self.disk.pin(stored)
            blob.move = self._start(MoveKind.READ, blob, stored)
        return blob

    def _reserve_host(self, key: Key, num_slots: int) -> Blob | None:
        blob = self.host.reserve(key, num_slots)
        if blob is not None:
            # Before other bytes come to lie there.
            self._void(self.host, blob)
        return blob

    def _void(self, tier: Tier, blob: Blob) -> None:
        if tier is self.disk:
            self._queue.append(Move(0, MoveKind.VOID, disk_slots=blob.slots))
        elif self._recorded and (slots := tuple(slot for slot in blob.slots if slot in self._recorded)):
            self._recorded.difference_update(slots)
            self._queue.append(Move(0, MoveKind.VOID, host_slots=slots))

    def _start(self, kind: MoveKind, host: Blob, disk: Blob | None = None) -> int:
        """Queue a move; it takes over the caller's pin of the disk's blob, and has one of its own on the host's."""
        generation = self._next_move
        self._next_move -= 1
        blob_kind, digest = host.key
        move = Move(generation, kind, host.slots, disk.slots if disk is not None else (), blob_kind, digest)
        self.host.pin(host)
        self._moves[generation] = FileMove(move, host, disk)
        if kind is MoveKind.READ:
            self._suspicion.began(generation)
        self._queue.append(move)
        return generation

    def _end_move(self, ended: FileMove, completion: Completion) -> None:
        kind, host, disk = ended.move.kind, ended.host, ended.disk
        if not completion.ok:
            (self.host if disk is None else self._disk).num_failures += 1
        if kind is MoveKind.READ:
            self._suspicion.ended(completion.generation, ok=completion.ok)
        if kind in (MoveKind.READ, MoveKind.VERIFY):
            host.move, host.is_late = None, False
            if completion.ok:
                host.is_whole = host.is_verified = True
            else:
                # Not found again: neither here, nor where the bytes are not what they were.
                self._forget_blob(self.host, host)
                if disk is not None:
                    self._forget_blob(self._disk, disk)
            self._wake_loads(ended.move.generation, host, completion)
        elif kind is MoveKind.WRITE:
            assert disk is not None
            self._num_writing -= len(host.slots)
            if not completion.ok:
                self._disk.retire_fresh(disk)
            elif disk.is_dropped:
                # Forgotten meanwhile; its records may have been written after they were voided.
                self._void(self._disk, disk)
            else:
                disk.is_whole = True
        elif host.is_dropped:
            self._recorded.update(host.slots)
            self._void(self.host, host)
        if disk is not None:
            self._disk.unpin(disk)
        self.host.unpin(host)
        self._write_some()

    def _give_up_reads(self) -> None:
        """The disk does not answer: loads go on without what they wait for. What reads bring in the end serves those who come then."""
        for generation, one in self._moves.items():
            if one.move.kind is MoveKind.READ and not one.host.is_late:
                one.host.is_late = True
                self._wake_loads(generation, one.host, Completion(generation, (False,), error="the disk does not answer"))

    def _wake_loads(self, generation: int, blob: Blob, completion: Completion) -> None:
        for load in [load for load in self._loads.values() if generation in load.waits_for]:
            load.waits_for.discard(generation)
            if not completion.ok:
                load.error = completion.error
                for i, held in enumerate(load.blobs):
                    if held is blob:
                        load.blobs[i] = None
                        self.host.unpin(blob)
            if all(held is None for held in load.blobs):
                del self._loads[load.transfer.generation]
                self._count_load(Completion(load.transfer.generation, (False,) * len(load.blobs), error=load.error))

    def _send_load(self, load: Load) -> Transfer:
        load.is_sent = True
        spans = tuple(span for span, blob in zip(load.transfer.spans, load.blobs, strict=True) if blob is not None)
        return replace(load.transfer, spans=spans, note=tuple(slot for blob in load.blobs if blob is not None for slot in blob.slots))

    def _end_load(self, load: Load, completion: Completion) -> None:
        told = iter(completion.arrived)
        arrived = []
        for blob in load.blobs:
            has_come = blob is not None and next(told, False)
            if blob is not None and not has_come:
                self.host.num_failures += 1
                self._forget_blob(self.host, blob)
            # A blob that was forgotten while it was loaded is not to be used.
            arrived.append(has_come and blob is not None and not blob.is_dropped)
        self._unpin(blob for blob in load.blobs if blob is not None)
        error = None if all(arrived) else completion.error or load.error or "a blob was forgotten while it was loaded"
        self._count_load(replace(completion, arrived=tuple(arrived), error=error))

    def _count_load(self, completion: Completion) -> None:
        self._stats = self._stats.with_load(completion)
        self._ended.append(completion)

    def _end_store(self, store: Store, completion: Completion) -> None:
        told = iter(completion.arrived)
        for blob in store.blobs:
            if not next(told, False):
                self.host.num_failures += 1
                self.host.drop(blob)
            elif not blob.is_dropped:
                blob.is_whole = True
                self._keep(blob)
        self._unpin(store.blobs)
        self._stats = self._stats.with_store(completion)
        self._ended.append(completion)

    def _keep(self, blob: Blob) -> None:
        """Have a blob that has come to the host tier outlive it: its records, its copy on the disk."""
        if self._is_mapped:
            self._recorded.update(blob.slots)
            self._start(MoveKind.RECORD, blob)
        if self.disk is not None:
            self._unsaved.append(blob.key)
            if len(self._unsaved) > 2 * self.host.num_slots:
                # The disk does not keep up: most of these have been evicted.
                self._unsaved = deque(key for key in dict.fromkeys(self._unsaved) if key in self.host)
            self._write_some()

    def _write_some(self) -> None:
        """Have blobs written to the disk, those that came first before others, while not too much of the host tier is held by that."""
        while self._unsaved:
            blob = self.host.get(self._unsaved[0])
            num_slots = len(blob.slots) if blob is not None else 0
            if self._num_writing and self._num_writing + num_slots > self.host.num_slots // _BACKLOG_SHARE:
                return
            self._unsaved.popleft()
            # Evicted meanwhile, or another load or store has the place: then it is not written.
            if blob is None or not blob.is_whole or blob.key in self._disk:
                continue
            on_disk = self._disk.reserve(blob.key, num_slots)
            if on_disk is not None:
                self._num_writing += num_slots
                self._start(MoveKind.WRITE, blob, on_disk)

    def _forget(self, key: Key) -> None:
        for tier in self._tiers:
            blob = tier.get(key)
            if blob is not None:
                self._forget_blob(tier, blob)

    def _forget_blob(self, tier: Tier, blob: Blob) -> None:
        if not blob.is_dropped:
            self._void(tier, blob)
            tier.drop(blob)

    @property
    def _disk(self) -> Tier:
        assert self.disk is not None
        return self.disk

    def _unpin(self, blobs: Iterable[Blob]) -> None:
        """Leaves the order of use as it is."""
        for blob in blobs:
            self.host.unpin(blob)


def _key(span: Span) -> Key:
    return (span.kind, span.digest)
