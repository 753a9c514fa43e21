"""What to evict when pages are needed: what saves least for the pages it holds and was not used lately; knows no page and no state."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Stamp = tuple[float, int]  # (priority, use number): the lowest goes first, and of equals the one that was used longest ago

Item = TypeVar("Item", bound=Hashable)


class EvictionQueue(Generic[Item]):
    """The items that may be evicted, by priority = floor at its last use + value, where value = tokens saved / pages held.

    The floor is the priority of the item that was evicted last, so it only rises. An item keeps its priority until it is used again; one that is not used
    falls behind in time, however valuable, and one that is worth twice as much lives through twice as much eviction. For items of one value this is least
    recently used. An item is put, discarded and popped in O(log n) amortized.

    *Source*: GreedyDual-Size: Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms" (1997); cost = tokens computed again, size = pages.
    """

    def __init__(self) -> None:
        self._stamps: dict[Item, Stamp] = {}
        # Lazy: an entry counts only while the item still has that stamp.
        self._heap: list[tuple[Stamp, Item]] = []
        self._num_uses = 0
        self.floor = 0.0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, item: Item) -> bool:
        return item in self._stamps

    def stamp(self, value: float) -> Stamp:
        """The stamp of something of this value that is used now."""
        self._num_uses += 1
        return self.floor + value, self._num_uses

    def put(self, item: Item, stamp: Stamp) -> None:
        """Make an item evictable, or give it another stamp. Stamps are of one use each, so no two items have the same."""
        self._stamps[item] = stamp
        heapq.heappush(self._heap, (stamp, item))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [(stamp, item) for item, stamp in self._stamps.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Make an item not evictable; no matter if it was not."""
        self._stamps.pop(item, None)

    def pop(self, limit: float | None = None) -> Item | None:
        """Take out the item of the lowest priority; None when there is none, or none whose priority is at most `limit`."""
        while self._heap:
            stamp, item = self._heap[0]
            live = self._stamps.get(item) == stamp
            if live and limit is not None and stamp[0] > limit:
                return None
            heapq.heappop(self._heap)
            if live:
                del self._stamps[item]
                self.floor = max(self.floor, stamp[0])
                return item
        return None
