"""A watch on every address that an interpreted kernel touches.

On a GPU a page id of INT_MAX, dereferenced, ends the process, or silently reads somebody's memory. Here the watch finds it: lanes that a mask lets through must
lie within the buffers of the call. Offending lanes are not touched, and the call fails afterwards.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch


class OutOfRangeError(RuntimeError):
    """A kernel touched memory outside the buffers that it was given."""


@dataclass
class Watch:
    """The address ranges of one call, and what left them."""

    starts: np.ndarray | None = None  # [n] uint64, ascending
    ends: np.ndarray | None = None
    strays: list[str] = field(default_factory=list)

    def keep_inside(self, addresses: np.ndarray, mask: np.ndarray, access: str) -> np.ndarray:
        """The mask without its stray lanes."""
        if self.starts is None or self.ends is None or not mask.any():
            return mask
        # Nearly always one load stays within one buffer, which two numbers tell.
        chosen = addresses[mask]
        low, high = chosen.min(), chosen.max()
        at = np.searchsorted(self.starts, low, side="right") - 1
        if at >= 0 and high < self.ends[at]:
            return mask
        place = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (place >= 0) & (addresses < self.ends[np.maximum(place, 0)])
        stray = int((mask & ~inside).sum())
        if stray:
            self.strays.append(f"{access} of {stray} lanes")
        return mask & inside

    def check_range(self, start: int, num_bytes: int, access: str) -> None:
        """Note a range of bytes that does not lie within one buffer."""
        if self.starts is None or self.ends is None:
            return
        at = int(np.searchsorted(self.starts, np.uint64(start), side="right")) - 1
        if at < 0 or start + num_bytes > int(self.ends[at]):
            self.strays.append(f"{access} of {num_bytes} bytes at {start:#x}")


# Of this process: an interpreter runs one kernel at a time.
watch = Watch()


@contextmanager
def watched(buffers: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Watch what runs meanwhile. Raises OutOfRangeError at the end if it touched anything but the storages of `buffers`."""
    storages = [buffer.untyped_storage() for buffer in buffers if buffer is not None and buffer.numel()]
    ranges = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
    watch.starts, watch.ends = (np.array(bounds, dtype=np.uint64) for bounds in zip(*ranges, strict=True))
    watch.strays.clear()
    try:
        yield
    finally:
        watch.starts = watch.ends = None
    if watch.strays:
        raise OutOfRangeError(f"the kernel touched memory outside its buffers: {watch.strays[0]}, and {len(watch.strays) - 1} more accesses")
