"""Host pages: the host tier's memory, slots of one page's bytes each, anonymous or a mapped file; knows no blob and no transfer.

How the tiers' sides meet:

- `TieredConnector` (scheduler side, no torch) decides all slots. `Transfer.note` of its loads and stores is a tuple of host slots, one for each page, in the
  order of `Transfer.pages`. `Metadata.note` is None or a tuple of `Move` (`atoll.offload.moves`).
- `TierWorker` (worker side) owns one `HostPages` and perhaps one `FileThreads` (`atoll.offload.disk`; None where no tier is a file). It copies between pool
  and host slots for the transfers, and hands the moves on:
  `register`: `host_pages.pin()` on CUDA. `run`: first `files.submit(metadata.note)`, then the copies. `poll`: its own completions and `files.poll()`. `wait`:
  `files.done` is a `threading.Event` which is set while `files.poll` would tell something; `files.num_in_flight` counts moves without a completion. `close`:
  its copies, then `files.close(timeout_s)`, then `host_pages.close()`.
- A VOID is done by the thread that writes, before any record that is asked for after it. Bytes may come to lie under the old record meanwhile: it has another
  checksum, so a process that is killed then leaves nothing that would be taken for a blob.
- A slot has one writer at a time, and no reader beside it; the connector sees to that. A RECORD or WRITE of host slots comes in a later metadata than the
  completion of the store that filled them, a load in a later one than the completion of its READ or VERIFY.
"""

import contextlib
import logging
import mmap

import torch

from atoll.errors import ConfigError
from atoll.offload.driver import Driver, load_driver

log = logging.getLogger(__name__)


class HostPages:
    """`pages` [N, page_bytes] uint8, contiguous, aligned to 4096 bytes at its beginning."""

    def __init__(self, memory: mmap.mmap, offset: int, num_pages: int, page_bytes: int) -> None:
        self._memory = memory
        self._pinned_by: Driver | None = None
        self.pages = torch.frombuffer(memory, dtype=torch.uint8, count=num_pages * page_bytes, offset=offset).view(num_pages, page_bytes)

    @classmethod
    def anonymous(cls, num_pages: int, page_bytes: int) -> "HostPages":
        """Memory of this process, zero, not touched yet. Raises ConfigError where the system has not got so much."""
        num_bytes = num_pages * page_bytes
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"the host tier of {num_bytes} bytes is more memory than this machine gives ({error}); give a smaller size") from error
        return cls(memory, 0, num_pages, page_bytes)

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def page_bytes(self) -> int:
        return self.pages.shape[1]

    @property
    def is_pinned(self) -> bool:
        return self._pinned_by is not None

    def pin(self) -> None:
        """Lock the memory for CUDA devices, in a thread that has used one; a file's pages may be refused, and then stay as they are."""
        driver = load_driver()
        if driver is None or self.is_pinned or not len(self.pages):
            return
        # Not every kernel has huge pages; with them there is less to lock, and it is sooner done.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        fault = driver.pin(self.pages.data_ptr(), self.pages.nbytes)
        if fault is not None:
            log.warning(
                "%.2f GB of host pages cannot be pinned (%s): transfers are slow and hold steps up; give less, or a file on a tmpfs such as /dev/shm",
                self.pages.nbytes / 1e9,
                fault,
            )
            return
        self._pinned_by = driver

    @property
    def is_closed(self) -> bool:
        """Whether the memory has gone back to the system."""
        return self._memory.closed

    def view(self, slot: int) -> memoryview:
        """One slot's bytes, writable."""
        return self.pages[slot].numpy().data

    def close(self) -> None:
        """Give the memory back. Nothing may copy any more; whoever else holds a view of it keeps it alive. May be called twice."""
        if self._pinned_by is not None:
            fault = self._pinned_by.unpin(self.pages.data_ptr())
            if fault is not None:
                log.warning("host pages cannot be unpinned: %s", fault)
            self._pinned_by = None
        self.pages = torch.empty((0, self.page_bytes), dtype=torch.uint8)
        # A view may be left somewhere; then the mapping goes with it.
        with contextlib.suppress(BufferError):
            self._memory.close()
