"""Torch told to raise where the host waits for the device, and to be quiet about it otherwise."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def on_wait(mode: str) -> None:
    """What torch does when the host waits for the device: "default" nothing, "error" raise."""
    with warnings.catch_warnings():
        # Torch warns, once, that it does not see every wait.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waits() -> Iterator[None]:
    """A wait in here raises; whatever happens, none raises afterwards."""
    try:
        on_wait("error")
        yield
    finally:
        on_wait("default")
