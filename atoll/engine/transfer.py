"""Small host values on their way to the device, without waiting for it."""

from collections.abc import Sequence
from typing import Any

import torch


def empty_on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A host tensor to fill and then copy to `device`: pinned for a GPU, since only such a copy does not wait.

    torch keeps pinned memory until the copies out of it are done, so the tensor may be dropped at once.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Python numbers as a tensor on `device`."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
