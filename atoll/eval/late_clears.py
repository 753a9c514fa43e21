"""The fault that `atoll eval replay --ordering-control` must show: a page is cleared after the load that filled it; knows no request and no tier."""

import torch

from atoll.offload.base import Completion, Metadata
from atoll.offload.base_worker import Fence, Regions, TransferWorker

WAIT_S = 1.0  # at a time, for loads that run


class LateClears:
    """A TransferWorker around another one: the clears of a load's pages come when the load has ended, and not before it began.

    Every load ends at the next poll, so that the same steps see the same bytes whatever the machine does meanwhile. Made for replays that ask for it, and for
    no other engine.
    """

    def __init__(self, worker: TransferWorker, pages: torch.Tensor) -> None:
        self._worker = worker
        self._pages = pages  # [P, page_bytes] uint8, the pool's buffer
        self._late: dict[int, list[int]] = {}  # of each load in flight, the pages whose clear was pending as it began

    def register(self, regions: Regions) -> None:
        self._worker.register(regions)

    def run(self, metadata: Metadata, fence: Fence) -> None:
        # The engine has cleared them, as it should; once more after the load is as if it had done so only then.
        clears = set(metadata.clears)
        for load in metadata.loads:
            self._late[load.generation] = [page for page in load.pages if page in clears]
        self._worker.run(metadata, fence)

    def poll(self) -> list[Completion]:
        ended = self._worker.poll()
        while not self._late.keys() <= {completion.generation for completion in ended}:
            self._worker.wait(WAIT_S)
            ended += self._worker.poll()
        for completion in ended:
            self._pages[self._late.pop(completion.generation, [])] = 0
        return ended

    def wait(self, timeout_s: float) -> None:
        self._worker.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._worker.close(timeout_s)
