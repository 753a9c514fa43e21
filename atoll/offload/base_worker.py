"""The connector protocol, its worker side: moves bytes between the pool and wherever the connector keeps them, behind a fence; knows no request.

`atoll.offload.base` is the contract of both sides.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from atoll.offload.base import Completion, Connector, Metadata


@dataclass(frozen=True, slots=True)
class Regions:
    """What a worker may read and write."""

    pages: torch.Tensor  # [P, page_bytes] uint8, the pool's buffer
    image_pages: int  # pages of a state's image; 0: the model keeps no state

    @property
    def page_bytes(self) -> int:
        return self.pages.shape[1]

    @property
    def device(self) -> torch.device:
        return self.pages.device


@dataclass(frozen=True, slots=True)
class Fence:
    """A point on the compute stream."""

    number: int  # of the step, as Metadata.fence has it
    event: "torch.cuda.Event | None" = None  # None: everything issued before it is done (a CPU computes as it is called)


def record_fence(number: int, device: torch.device) -> Fence:
    """A fence behind all that was issued on the current stream of `device`."""
    if device.type != "cuda":
        return Fence(number)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(number, event)


class TransferWorker(Protocol):
    """Called by the thread that issues compute work. Only `wait` and `close` may block."""

    def register(self, regions: Regions) -> None:
        """Called once, before anything else. Raises ConfigError for regions that do not fit what is kept."""
        ...

    def run(self, metadata: Metadata, fence: Fence) -> None:
        """Start what the metadata names, all of it behind the fence. The clears have been issued, before the fence."""
        ...

    def poll(self) -> list[Completion]:
        """What has ended since the last call. The current stream is ordered behind every load told of, so whatever is issued next reads what it brought."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when `poll` would tell something, when nothing is in flight, or after the time."""
        ...

    def close(self, timeout_s: float) -> None:
        """End threads and give memory back. What is in flight after the time is left undone: whole or absent where it was going. May be called twice."""
        ...


class Offload(NamedTuple):
    """Both sides of a connector."""

    connector: Connector
    worker: TransferWorker
