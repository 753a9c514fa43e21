"""Whether a disk is to be asked at all: a read that takes too long makes it suspect, until one comes back; knows no blob and no file."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

RETRY_S = 60.0  # between two tries of a disk that is suspect: each costs a request its whole time


class Suspicion:
    """Told of every read. What a suspect disk holds counts as missing, so that not every request waits for it in vain."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_suspect = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._reads: dict[int, float] = {}  # generation -> when it began, the oldest first; those that are too late are not in it
        self._retry_at_s = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether a read may begin."""
        return not self.is_suspect or self._clock() >= self._retry_at_s

    def began(self, generation: int) -> None:
        self._reads[generation] = now_s = self._clock()
        # One try at a time.
        self._retry_at_s = now_s + RETRY_S

    def ended(self, generation: int, *, ok: bool) -> None:
        self._reads.pop(generation, None)
        if ok and self.is_suspect:
            self.is_suspect = False
            log.info("the disk tier answers again")

    def has_late_reads(self) -> bool:
        """Whether reads have become too late since the last call; then the disk is suspect."""
        now_s, num_reads = self._clock(), len(self._reads)
        while self._reads and now_s - next(iter(self._reads.values())) >= self._timeout_s:
            del self._reads[next(iter(self._reads))]
        if len(self._reads) == num_reads:
            return False
        if not self.is_suspect:
            log.warning(
                "the disk tier has not answered for %.0f s: what it alone holds is computed, and it is tried again every %.0f s", self._timeout_s, RETRY_S
            )
        self.is_suspect = True
        self._retry_at_s = now_s + RETRY_S
        return True
