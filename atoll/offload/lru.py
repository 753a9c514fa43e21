"""One tier's books: which blob lies in which slots, which were used last, which are held; knows no byte and no transfer."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.offload.base import BlobKind, TierStats

Key = tuple[BlobKind, bytes]  # kind and digest


@dataclass(eq=False, slots=True)
class Blob:
    """A blob in a tier, from its reservation on."""

    key: Key
    slots: tuple[int, ...]
    is_whole: bool = False  # its bytes are there
    is_verified: bool = True  # False: found in a file, and its checksum not compared yet
    move: int | None = None  # generation of the READ or VERIFY that will make it whole and verified
    is_late: bool = False  # nobody waits for that move any more
    num_pins: int = 0  # of what is in flight: it is neither evicted nor are its slots given to another
    is_dropped: bool = False  # no longer found; its slots come back with the last pin
    fresh: tuple[int, ...] = ()  # of its slots, those that were never used before
    retired: tuple[int, ...] = ()  # of its slots, those that will not come back

    @property
    def is_coming(self) -> bool:
        """Whether its bytes are there, or on their way and waited for."""
        return self.is_whole or (self.move is not None and not self.is_late)


class Tier:
    """Whole blobs only: one that loses a slot is gone. The least recently used go first; a chain is touched from its deepest page to its root.

    A slot that was never used is fresh: its place in a file may not exist yet, and may turn out not to be had (`retire_fresh`).
    """

    def __init__(self, name: str, num_slots: int, page_bytes: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self.page_bytes = page_bytes
        self.num_evicted = 0
        self.num_failures = 0
        self._blobs: OrderedDict[Key, Blob] = OrderedDict()  # least recently used first
        self._used: deque[int] = deque()  # free, and used before
        self._next_fresh = 0
        self._end_fresh = num_slots
        self._num_held = 0  # slots
        self._num_pinned = 0  # slots

    def __len__(self) -> int:
        return len(self._blobs)

    def __contains__(self, key: Key) -> bool:
        return key in self._blobs

    def get(self, key: Key) -> Blob | None:
        return self._blobs.get(key)

    @property
    def keys(self) -> list[Key]:
        """Of the blobs that can be found, least recently used first."""
        return list(self._blobs)

    @property
    def num_available(self) -> int:
        """Slots that a reservation could get: free ones and those of blobs that nothing holds."""
        return self.num_slots - self._num_pinned

    def touch(self, key: Key) -> None:
        if key in self._blobs:
            self._blobs.move_to_end(key)

    def reserve(self, key: Key, num_slots: int) -> Blob | None:
        """A pinned blob that is not whole yet, others evicted for it; None, and nothing changed, where too much is held."""
        assert key not in self._blobs
        if num_slots > self.num_available:
            return None
        self._make_room(num_slots)
        before = self._next_fresh
        slots = tuple(self._take_slot() for _ in range(num_slots))
        self._num_held += num_slots
        blob = self._blobs[key] = Blob(key, slots, fresh=tuple(slot for slot in slots if slot >= before))
        self.pin(blob)
        return blob

    def adopt(self, key: Key, slots: tuple[int, ...], *, is_verified: bool) -> Blob:
        """A blob that a file holds from before. All are adopted before anything is reserved; then `free_rest`."""
        assert key not in self._blobs
        self._num_held += len(slots)
        blob = self._blobs[key] = Blob(key, slots, is_whole=True, is_verified=is_verified)
        return blob

    def free_rest(self) -> None:
        """After the last `adopt`: every other slot is free."""
        held = {slot for blob in self._blobs.values() for slot in blob.slots}
        self._next_fresh = max(held, default=-1) + 1
        self._used = deque(slot for slot in range(self._next_fresh) if slot not in held)

    def pin(self, blob: Blob) -> None:
        if blob.num_pins == 0:
            self._num_pinned += len(blob.slots)
        blob.num_pins += 1

    def unpin(self, blob: Blob) -> None:
        assert blob.num_pins > 0
        blob.num_pins -= 1
        if blob.num_pins == 0:
            self._num_pinned -= len(blob.slots)
            if blob.is_dropped:
                self._free(blob)

    def drop(self, blob: Blob) -> None:
        """It is not found any more from now on."""
        if blob.is_dropped:
            return
        blob.is_dropped = True
        del self._blobs[blob.key]
        if blob.num_pins == 0:
            self._free(blob)

    def retire_fresh(self, blob: Blob) -> None:
        """A write failed: the slots that it took fresh, and all that are fresh still, are given up; the tier goes on with those that it has. Drops the blob."""
        self.num_slots -= len(blob.fresh) + self._end_fresh - self._next_fresh
        self._end_fresh = self._next_fresh
        blob.retired, blob.fresh = blob.fresh, ()
        self.drop(blob)

    def stats(self) -> TierStats:
        capacity_bytes = self.num_slots * self.page_bytes
        return TierStats(self.name, self._num_held * self.page_bytes, capacity_bytes, len(self._blobs), self.num_evicted, self.num_failures)

    def check(self, dropped: Iterable[Blob] = ()) -> None:
        """Recount; `dropped` are those that pins still keep. AssertionError where the books disagree."""
        blobs = {id(blob): blob for blob in (*self._blobs.values(), *dropped)}.values()
        held = [slot for blob in blobs for slot in blob.slots]
        assert len(held) == self._num_held == len(set(held)), (self.name, len(held), self._num_held)
        assert not set(held) & set(self._used), self.name
        assert self._num_pinned == sum(len(blob.slots) for blob in blobs if blob.num_pins), self.name
        retired = sum(len(blob.retired) for blob in blobs)
        assert len(held) - retired + len(self._used) + self._end_fresh - self._next_fresh == self.num_slots, self.name

    def _make_room(self, num_slots: int) -> None:
        missing = num_slots - len(self._used) - (self._end_fresh - self._next_fresh)
        victims = []
        for blob in self._blobs.values():
            if missing <= 0:
                break
            if blob.num_pins == 0:
                victims.append(blob)
                missing -= len(blob.slots)
        for blob in victims:
            self.num_evicted += 1
            self.drop(blob)

    def _take_slot(self) -> int:
        if self._used:
            return self._used.popleft()
        self._next_fresh += 1
        return self._next_fresh - 1

    def _free(self, blob: Blob) -> None:
        self._num_held -= len(blob.slots)
        self._used.extend(slot for slot in blob.slots if slot not in blob.retired)
