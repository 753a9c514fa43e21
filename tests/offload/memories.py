"""The pool as a slow worker sees it: a buffer's pages, or those of a runner without tensors."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tests.engine.shadow import Shadow


class Memory(Protocol):
    def read(self, page: int) -> Any: ...
    def write(self, page: int, content: Any) -> None: ...
    def spoil(self, page: int) -> None:
        """What a transfer that failed may have left."""
        ...


class TensorMemory:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer  # [P, page_bytes] uint8

    def read(self, page: int) -> torch.Tensor:
        return self._buffer[page].clone()

    def write(self, page: int, content: torch.Tensor) -> None:
        self._buffer[page] = content

    def spoil(self, page: int) -> None:
        self._buffer[page] = 0xFF


class ShadowMemory:
    """The pages of a runner without tensors."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def read(self, page: int) -> tuple[Any, ...]:
        return tuple(self._shadow.rows.get(slot) for slot in self._slots(page))

    def write(self, page: int, content: Sequence[Any]) -> None:
        self._shadow.rows.update(zip(self._slots(page), content, strict=True))

    def spoil(self, page: int) -> None:
        self.write(page, ["spoilt"] * self._shadow.page_size)

    def _slots(self, page: int) -> range:
        return range(page * self._shadow.page_size, (page + 1) * self._shadow.page_size)
