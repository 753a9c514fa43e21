"""What the engine may ask of any model, and what a model may ask of any checkpoint."""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from atoll.models.model_config import ModelConfig

# attend(layer, q [T, HQ, D], k [T, HKV, D], v [T, HKV, D]) -> [T, HQ, D]. Innermost strides are 1; rows of q, k and v may be strided.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(Protocol):
    """A decoder for inference. It keeps nothing between calls: keys and values live behind `attend`."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[T, H]` of tokens `[T]` at positions `[T]`, both int64."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32 of hidden states `[N, H]`."""
        ...


class WeightSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names, whatever file holds them."""

    path: str

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the CPU, in `dtype`. Raises ModelError when its bytes are damaged."""
        ...
