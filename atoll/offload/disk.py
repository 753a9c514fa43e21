"""Threads that move blobs between host pages and files, and keep the files' records; knows no request and no pool."""

import threading
from collections.abc import Sequence

from atoll.offload.base import Completion
from atoll.offload.moves import Move


class FileThreads:
    """Runs moves. Nothing here raises for what a disk does: it is in the completions."""

    done: threading.Event  # set while `poll` would tell something

    @property
    def num_in_flight(self) -> int:
        """Moves that were submitted and not told of."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether every thread runs; once one has died all moves fail, those to come too."""
        raise NotImplementedError

    def submit(self, moves: Sequence[Move]) -> None:
        """Start them; the VOIDs are done on return."""
        raise NotImplementedError

    def poll(self) -> list[Completion]:
        """What has ended since the last call, in the moves' generations, one entry in `arrived`."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Return when `poll` would tell something, when nothing is in flight, or after the time."""
        raise NotImplementedError

    def close(self, timeout_s: float) -> None:
        """End the threads; what is still queued after the time is dropped. May be called twice."""
        raise NotImplementedError
