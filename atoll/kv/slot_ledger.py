"""The books of the state slots: which are held and which are free; knows no tensor, no layout and no request."""

from collections import Counter
from collections.abc import Iterable

from atoll.errors import ConfigError, OutOfSlotsError, PoolCorruptError, PoolError

MAX_SLOTS = 2**31  # slot ids are int32


class SlotLedger:
    """Who holds which of `num_slots` slots: one holder each, since a state is written at every token.

    There is no null slot: a padded row of a batch names none (-1), and the delta rule then touches nothing. Every call checks its argument first, so a call
    that raises has changed nothing. The same calls give the same slots.

    Raises ConfigError for a bad `num_slots`.
    """

    def __init__(self, num_slots: int) -> None:
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ConfigError(f"num_slots {num_slots} is outside 1 to {MAX_SLOTS}; give one for each sequence that runs at a time")
        # Says the same as the free list; kept apart so that check() has two accounts to compare.
        self._is_held: list[bool] = [False] * num_slots
        # A stack, next slot last: the slot touched last goes out first, and slots beyond the traffic stay untouched.
        self._free: list[int] = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self._is_held)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_held(self, slot: int) -> bool:
        self._check_id(slot)
        return self._is_held[slot]

    def allocate(self) -> int:
        """Hand out a free slot, whatever its bytes hold. Raises OutOfSlotsError when none is free."""
        if not self._free:
            raise OutOfSlotsError(f"a slot was asked for, 0 of {self.num_slots} are free; finish or preempt a sequence, or make more slots")
        slot = self._free.pop()
        self._is_held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Take a slot back. Raises PoolError when it is free, or no slot at all."""
        self._check_id(slot)
        if not self._is_held[slot]:
            raise PoolError(f"slot {slot} is free and cannot be released; it was given back before, or never allocated")
        self._is_held[slot] = False
        self._free.append(slot)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Recount everything from scratch.

        `held`, when given, names every slot that somebody holds, once; the books must agree, so a slot that nobody gave back is found too.

        Raises PoolCorruptError at the first disagreement.
        """
        on_free = Counter(self._free)
        for slot, times in on_free.items():
            if not 0 <= slot < self.num_slots:
                raise PoolCorruptError(f"slot {slot} is on the free list, which may hold 0 to {self.num_slots - 1}; foreign ids stay off it")
            if times > 1:
                raise PoolCorruptError(f"slot {slot} is {times} times on the free list, once is the limit; it was freed twice")
        for slot, is_held in enumerate(self._is_held):
            if is_held == (slot in on_free):
                where = "held and on" if is_held else "not held and off"
                raise PoolCorruptError(f"slot {slot} is {where} the free list; free slots, and no others, are on it")
        if held is not None:
            self._check_held_by(Counter(held))

    def _check_held_by(self, held: Counter[int]) -> None:
        for slot, times in held.items():
            self._check_id(slot)
            if times > 1:
                raise PoolCorruptError(f"slot {slot} has {times} holders, once is the limit; two sequences write one state")
        for slot, is_held in enumerate(self._is_held):
            if is_held != (slot in held):
                fault = "it was lost without a release" if is_held else "it was released behind its holder's back"
                raise PoolCorruptError(f"slot {slot} is {'held' if is_held else 'free'} in the books and has {held[slot]} holders; {fault}")

    def _check_id(self, slot: int) -> None:
        # Without this, -1 would name the last slot.
        if not 0 <= slot < self.num_slots:
            raise PoolError(f"slot {slot} is outside 0 to {self.num_slots - 1}; use slots that allocate returned")
