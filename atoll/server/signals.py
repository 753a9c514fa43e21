"""What SIGTERM and SIGINT do within a block of code; knows no server."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Both go to `handler` until the end of the block, and then to whom they went before. On the main thread alone, as Python asks."""
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def blocked_stop_signals() -> Iterator[None]:
    """Both wait until the end of the block, on this thread and in the processes and threads that it starts: a process until it calls `ignore_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """From now on, and those that wait, in this process and in those that it starts."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class Interrupt:
    """A handler for `stop_signals` that ends the program where it is, with exit code 0, or at the end of a `held` block.

    An import must be held: what a handler raises is lost within a finalizer, and comes out of a class's `__set_name__` as another error.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._is_held = False

    def __call__(self, *_: object) -> None:
        self._is_asked = True
        self._end_if_asked()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._is_asked and not self._is_held:
            raise SystemExit(0)
