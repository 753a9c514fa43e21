"""What SIGTERM and SIGINT do within a block of code; knows no server."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Both go to `handler` until the end of the block, and then to whom they went before. On the main thread alone, as Python asks."""
    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
