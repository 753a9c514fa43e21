"""Reads a checkpoint's tensors onto their device by the names of one part of a model; knows no model."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from atoll.models.base import WeightSource

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightReader:
    """Reads under `prefix`: a layer asks for `norm.weight`, whichever layer it is."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""

    def __call__(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor; several are joined along their first dimension."""
        parts = [self.source.read(self.prefix + name, dtype or self.dtype).to(self.device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def under(self, prefix: str) -> "WeightReader":
        return replace(self, prefix=self.prefix + prefix)

    def holds(self, name: str) -> bool:
        return self.prefix + name in self.source.names()


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """The same shapes, one level up."""
    return {prefix + name: shape for name, shape in shapes.items()}


def text_root(names: Collection[str]) -> str:
    """What the names of a decoder's tensors begin with: checkpoints that also hold an image encoder set the decoder apart."""
    nested = "model.language_model."
    return nested if any(name.startswith(nested) for name in names) else "model."
