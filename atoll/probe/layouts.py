"""The byte layouts a KV cache may have: how K, V and scales of hostile cases lie in one buffer. Knows no sequence.

===============  ==========================================================================================
layout           where the rows lie
===============  ==========================================================================================
``page_major``   one page holds K, V and scales, between other layers' bytes: the page stride is shared
``hnd``          K pages, then V pages, then scales; `[P, HKV, S, D]`, each contiguous
``nhd``          as ``hnd``, but tokens before heads: `[P, S, HKV, D]`, transposed V `[P, D, HKV, S]`
``odd``          as ``hnd``, with 3 unused elements after every row: nothing is aligned to 16 bytes
===============  ==========================================================================================
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from atoll.ops.attention import DecodeSpec, PagedKV
from atoll.ops.quant.formats import storage_dtype

Layout = Literal["page_major", "hnd", "nhd", "odd"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_ALIGN_BYTES = 16
_OTHER_LAYERS_BYTES = 48  # before and after this layer's fields in a page of `page_major`
_ODD_ROW_PAD = 3  # elements


@dataclass(frozen=True)
class Field:
    """One of K, V, k_scale, v_scale: its place in the buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # logical, page first
    stride: tuple[int, ...]  # elements
    offset_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        end = self.offset_bytes + span * self.dtype.itemsize
        return buffer[self.offset_bytes : end].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class CacheLayout:
    """Where one layer's cache lies in a buffer of `num_bytes`."""

    fields: dict[str, Field]
    num_bytes: int

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: field.view(buffer) for name, field in self.fields.items()}


def cache_layout(spec: DecodeSpec, num_pages: int, layout: Layout) -> CacheLayout:
    """Places of all rows of `num_pages` pages; the scales of `fp8_tensor` are the caller's and lie elsewhere."""
    rows = ("h", "s", "d")
    shapes: dict[str, tuple[tuple[str, ...], torch.dtype]] = {
        "k": (rows, storage_dtype(spec.kv_format)),
        "v": (rows if spec.v_layout == "plain" else ("h", "d", "s"), storage_dtype(spec.kv_format)),
    }
    if spec.kv_format == "fp8_token":
        shapes |= dict.fromkeys(("k_scale", "v_scale"), (("h", "s"), torch.float32))
    sizes = {"h": spec.num_kv_heads, "s": spec.page_size, "d": spec.head_dim}
    fields: dict[str, Field] = {}
    cursor = _OTHER_LAYERS_BYTES if layout == "page_major" else 0
    for name, (axes, dtype) in shapes.items():
        strides, page_elements = _inner_strides(axes, sizes, layout)
        fields[name] = Field(dtype, (num_pages, *(sizes[a] for a in axes)), (page_elements, *strides), cursor)
        pages_here = 1 if layout == "page_major" else num_pages
        cursor += _align(pages_here * page_elements * dtype.itemsize)
    if layout != "page_major":
        return CacheLayout(fields, cursor)
    page_bytes = cursor + _OTHER_LAYERS_BYTES
    paged = {name: Field(f.dtype, f.shape, (page_bytes // f.dtype.itemsize, *f.stride[1:]), f.offset_bytes) for name, f in fields.items()}
    return CacheLayout(paged, num_pages * page_bytes)


def _inner_strides(axes: tuple[str, ...], sizes: dict[str, int], layout: Layout) -> tuple[tuple[int, ...], int]:
    """Strides of the axes within a page, and the elements of a page."""
    stored = axes
    if layout == "nhd" and len(axes) == 3:
        stored = (axes[1], axes[0], axes[2])
    elif layout == "nhd":
        stored = (axes[1], axes[0])
    step = 1
    stride: dict[str, int] = {}
    for i, axis in enumerate(reversed(stored)):
        stride[axis] = step
        step *= sizes[axis]
        if i == 0 and layout == "odd":
            step += _ODD_ROW_PAD
    return tuple(stride[a] for a in axes), step


def _align(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGN_BYTES) * _ALIGN_BYTES


def paged_kv(spec: DecodeSpec, views: dict[str, torch.Tensor], tensor_scales: tuple[torch.Tensor, torch.Tensor] | None) -> PagedKV:
    """The views as the cache of one layer; `tensor_scales` for `fp8_tensor` alone."""
    k_scale, v_scale = tensor_scales if tensor_scales is not None else (views.get("k_scale"), views.get("v_scale"))
    return PagedKV(spec.kv_format, views["k"], views["v"], k_scale, v_scale, spec.v_layout)
