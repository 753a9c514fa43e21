"""Block-wise fp8 weights, read as the real numbers that they stand for: a source of tensors over another one; knows no model."""

from collections.abc import Collection
from typing import Protocol

import torch

from atoll.errors import ModelError
from atoll.models.base import WeightSource

SCALE_SUFFIX = "_scale_inv"


class StoredTensors(WeightSource, Protocol):
    """A source that also tells in which dtype its file holds a tensor."""

    def dtype(self, name: str) -> str:
        """As safetensors spells it: F8_E4M3, BF16, F32."""
        ...


class BlockFP8Weights:
    """A `WeightSource` in which an e4m3 tensor `X` with the scales `X_scale_inv` is one tensor, `X`: every number times the scale of its block.

    Which tensors are fp8 their stored dtypes say, so the config's list of modules that were not converted is not needed. Blocks at the lower and right edge
    may be cut. A third dimension in front counts experts. The products are made on `device`, which gets an fp8 tensor as it is stored.

    Raises ModelError, naming the tensor, when `shape` or `read` meets an fp8 tensor without scales, scales of another shape, or one that is not finite, and
    scales of a tensor that is not fp8.
    """

    def __init__(self, stored: StoredTensors, block: tuple[int, int], device: torch.device) -> None:
        self.path = stored.path
        self.stored = stored
        self.block = block  # rows, columns
        self.device = device
        held = stored.names()
        self._scales = {name for name in held if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in held}
        self._names = dict.fromkeys(name for name in held if name not in self._scales)

    def names(self) -> Collection[str]:
        """Without the scales, but for those that belong to no tensor."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        self._is_scaled(name)
        return self.stored.shape(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_scaled(name):
            return self.stored.read(name, dtype)
        scales = self.stored.read(name + SCALE_SUFFIX, torch.float32)
        bad = scales.isfinite().logical_not().nonzero().tolist()
        if bad:
            where = ", ".join(map(str, bad[0]))
            raise ModelError(f"{self.path}: tensor {name}{SCALE_SUFFIX} holds {scales[tuple(bad[0])]} at [{where}]; a scale is finite, fetch the folder again")
        return dequantize_blocks(self.stored.read(name, torch.float8_e4m3fn).to(self.device), scales.to(self.device), self.block, dtype)

    def _is_scaled(self, name: str) -> bool:
        """Whether the tensor is fp8. Raises ModelError where it and its scales do not fit together."""
        has_scales, is_fp8 = name + SCALE_SUFFIX in self._scales, self.stored.dtype(name) == "F8_E4M3"
        if is_fp8 and not has_scales:
            raise ModelError(f"{self.path}: tensor {name} is fp8 and its scales {name}{SCALE_SUFFIX} are missing; the checkpoint is incomplete")
        if has_scales and not is_fp8:
            dtype = self.stored.dtype(name)
            raise ModelError(f"{self.path}: tensor {name} is {dtype} and has scales {name}{SCALE_SUFFIX}, which only F8_E4M3 has; the checkpoint is damaged")
        if is_fp8:
            self._check_scale_shape(name)
        return is_fp8

    def _check_scale_shape(self, name: str) -> None:
        shape, held = self.stored.shape(name), self.stored.shape(name + SCALE_SUFFIX)
        rows, columns = self.block
        wanted = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)) if len(shape) >= 2 else None
        if held != wanted:
            raise ModelError(
                f"{self.path}: tensor {name}{SCALE_SUFFIX} has shape {held}, blocks of {rows} x {columns} of a tensor {shape} ask for {wanted}; "
                "the checkpoint is damaged, or its config gives another weight_block_size"
            )


def dequantize_blocks(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Each number of `weight` [..., out, in] e4m3 times the scale [..., ceil(out / rows), ceil(in / columns)] fp32 of its block, rounded once, to `dtype`."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    num_rows, num_columns = weight.shape[-2:]
    by_matrix = zip(weight.view(-1, num_rows, num_columns), scales.view(-1, *scales.shape[-2:]), out.view(-1, num_rows, num_columns), strict=True)
    for matrix, scale, result in by_matrix:
        # By rows of blocks, so that fp32 copies stay small beside a fused tensor of all experts.
        for i_row, row_scales in enumerate(scale):
            rows = slice(i_row * block[0], (i_row + 1) * block[0])
            result[rows] = matrix[rows].float() * row_scales.repeat_interleave(block[1])[:num_columns]
    return out
