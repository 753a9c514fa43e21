"""What the engine may ask of any model, and what a model may ask of any checkpoint."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.models.model_config import ModelConfig

# attend(layer, q [T, HQ, D], k [T, HKV, D], v [T, HKV, D]) -> [T, HQ, D]. Innermost strides are 1; rows of q, k and v may be strided.
# `layer` counts the layers that attend, from 0: in a hybrid model the others have no keys and values, and no number here.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# delta(layer, mixed_qkv [T, conv_dim], conv_weight [conv_dim, W], g [T, HV] fp32, beta [T, HV] fp32) -> [T, HV, DV], in mixed_qkv's dtype.
# `layer` counts the linear-attention layers, from 0. Behind it lie the two states of a sequence, and all that reads or writes them, in this order:
# causal depthwise convolution of mixed_qkv (conv_weight[:, -1] meets the newest token; state: the last W - 1 rows), SiLU,
# split into q and k [T, HK, DK] and v [T, HV, DV] (value head h reads key head h // (HV / HK)), l2norm of q and k (x * rsqrt(sum(x^2) + 1e-6)), q * DK^-0.5,
# then the gated delta rule, for each value head on its fp32 state S [DK, DV]: S *= exp(g); S += k (beta (v - k S))^T; out = q S.
# conv_weight is handed over with each call, so that whoever keeps the states needs to know no model. mixed_qkv's rows may be strided.
Delta = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(Protocol):
    """A decoder for inference. It keeps nothing between calls: keys and values live behind `attend`."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[T, H]` of tokens `[T]` at positions `[T]`, both int64."""
        ...

    @property
    def waits_for_device(self) -> bool:
        """Whether a forward pass reads something back to the host, so that no CUDA graph can hold it."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32 of hidden states `[N, H]`."""
        ...


class HybridModel(Protocol):
    """As `Model`, for a decoder that also has linear-attention layers: their states live behind `delta`."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, delta: Delta) -> torch.Tensor:
        """Hidden states `[T, H]` of tokens `[T]` at positions `[T]`, both int64."""
        ...

    @property
    def waits_for_device(self) -> bool:
        """Whether a forward pass reads something back to the host, so that no CUDA graph can hold it."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32 of hidden states `[N, H]`."""
        ...


@dataclass(frozen=True)
class Pass:
    """What the layers of one forward pass share."""

    cos: torch.Tensor  # [T, 1, rotary dim] fp32
    signed_sin: torch.Tensor  # [T, 1, rotary dim] fp32
    attend: Attend
    delta: Delta | None = None  # given to hybrid models


class WeightSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names, whatever file holds them."""

    path: str

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, on the CPU or already where the model will be. Raises ModelError when its bytes are damaged."""
        ...
