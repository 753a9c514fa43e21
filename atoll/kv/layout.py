"""Where each byte of a page lies: the K rows, V rows and scales of every attention layer; knows no pool and no page's owner."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from atoll.errors import SpecError
from atoll.ops.attention.spec import DecodeSpec, PagedKV, VLayout
from atoll.ops.quant.formats import KVFormat, storage_dtype

# A GPU's cache line: no two fields share one, and each starts where the widest loads (TMA: 16 bytes) want it.
FIELD_ALIGN_BYTES = 128
# One widest load. The scales of a layer are small (8 bytes at page size 1 with 2 heads), so a line for each would cost a quarter of such a page.
SCALE_ALIGN_BYTES = 16


@dataclass(frozen=True)
class PageLayout:
    """Offsets inside a page, and the views of a buffer `[P, page_bytes]` of uint8 that follow from them.

    ::

        | K 0 | V 0 | K 1 | V 1 | ... | K scales 0 | V scales 0 | K scales 1 | ... |
          one page = one span of page_bytes;  rows 128-byte aligned, then (fp8_token) scales 16-byte aligned

    A field is contiguous within its page, `[HKV, S, D]` for rows. `page_bytes` is a multiple of the field alignment too, so that what is aligned in
    page 0 is aligned in all. No view copies; strides and offsets are int64, since a pool is far larger than 2^31 bytes.

    Raises SpecError for a value that decode attention would not take, with the same words.
    """

    num_layers: int  # attention layers; others keep nothing in a page
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    kv_format: KVFormat = "bf16"
    v_layout: VLayout = "plain"  # V field: plain [HKV, S, D], transposed [HKV, D, S]

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise SpecError(f"num_layers {self.num_layers} is below 1; give the model's count of attention layers")
        # A page that no decode spec can read is of no use, so the spec is asked; one query head per KV head always fits.
        DecodeSpec(self.num_kv_heads, self.num_kv_heads, self.head_dim, self.page_size, kv_format=self.kv_format, v_layout=self.v_layout)

    @property
    def has_scale_rows(self) -> bool:
        """Scales live in the page, one per token and head."""
        return self.kv_format == "fp8_token"

    @property
    def rows_bytes(self) -> int:
        """One layer's K rows (or V rows) of one page, without padding."""
        return self.num_kv_heads * self.page_size * self.head_dim * storage_dtype(self.kv_format).itemsize

    @property
    def scales_bytes(self) -> int:
        """One layer's K scales (or V scales) of one page, without padding; 0 when the format keeps none in the page."""
        return self.num_kv_heads * self.page_size * torch.float32.itemsize if self.has_scale_rows else 0

    @property
    def page_bytes(self) -> int:
        """Span of one page, padding included."""
        return _align(self._scales_start + 2 * self.num_layers * _align(self.scales_bytes, SCALE_ALIGN_BYTES), FIELD_ALIGN_BYTES)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that alignment costs."""
        return self.page_bytes - 2 * self.num_layers * (self.rows_bytes + self.scales_bytes)

    @property
    def bytes_per_token(self) -> float:
        """What a token costs in a full page, padding included."""
        return self.page_bytes / self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def k_offset(self, layer: int) -> int:
        """Byte offset in a page of a layer's K rows."""
        return 2 * self._check_layer(layer) * _align(self.rows_bytes, FIELD_ALIGN_BYTES)

    def v_offset(self, layer: int) -> int:
        """Byte offset in a page of a layer's V rows."""
        return self.k_offset(layer) + _align(self.rows_bytes, FIELD_ALIGN_BYTES)

    def k_scale_offset(self, layer: int) -> int:
        """Byte offset in a page of a layer's K scales. Raises SpecError when the format keeps none in the page."""
        if not self.has_scale_rows:
            raise SpecError(f"kv_format {self.kv_format!r} keeps no scale in a page; only 'fp8_token' does")
        return self._scales_start + 2 * self._check_layer(layer) * _align(self.scales_bytes, SCALE_ALIGN_BYTES)

    def v_scale_offset(self, layer: int) -> int:
        """Byte offset in a page of a layer's V scales. Raises SpecError when the format keeps none in the page."""
        return self.k_scale_offset(layer) + _align(self.scales_bytes, SCALE_ALIGN_BYTES)

    def k_pages(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's K rows: a view [P, HKV, S, D]."""
        shape = (self.num_kv_heads, self.page_size, self.head_dim)
        return self._view(buffer, self.k_offset(layer), self.rows_bytes, storage_dtype(self.kv_format), shape)

    def v_pages(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's V rows: a view [P, HKV, S, D], transposed [P, HKV, D, S]."""
        rows = (self.page_size, self.head_dim) if self.v_layout == "plain" else (self.head_dim, self.page_size)
        return self._view(buffer, self.v_offset(layer), self.rows_bytes, storage_dtype(self.kv_format), (self.num_kv_heads, *rows))

    def k_scales(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's K scales: a view [P, HKV, S] of fp32. Raises SpecError when the format keeps none in the page."""
        return self._view(buffer, self.k_scale_offset(layer), self.scales_bytes, torch.float32, (self.num_kv_heads, self.page_size))

    def v_scales(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's V scales: a view [P, HKV, S] of fp32. Raises SpecError when the format keeps none in the page."""
        return self._view(buffer, self.v_scale_offset(layer), self.scales_bytes, torch.float32, (self.num_kv_heads, self.page_size))

    def layer_kv(
        self,
        buffer: torch.Tensor,  # [P, page_bytes] uint8
        layer: int,
        k_scale: torch.Tensor | None = None,  # [1] fp32, exactly for fp8_tensor
        v_scale: torch.Tensor | None = None,
    ) -> PagedKV:
        """One layer's cache, as the attention operations take it. Everything in it is a view."""
        needs_scale = self.kv_format == "fp8_tensor"
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if needs_scale != (scale is not None):
                given = "None" if scale is None else "given"
                raise SpecError(f"{name} is {given} for kv_format {self.kv_format!r}; pass fp32 of shape (1,) exactly for 'fp8_tensor'")
        if self.has_scale_rows:
            k_scale, v_scale = self.k_scales(buffer, layer), self.v_scales(buffer, layer)
        return PagedKV(self.kv_format, self.k_pages(buffer, layer), self.v_pages(buffer, layer), k_scale, v_scale, self.v_layout)

    def fields(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Every field of every layer, as views."""
        for layer in range(self.num_layers):
            yield self.k_pages(buffer, layer)
            yield self.v_pages(buffer, layer)
            if self.has_scale_rows:
                yield self.k_scales(buffer, layer)
                yield self.v_scales(buffer, layer)

    @property
    def _scales_start(self) -> int:
        return 2 * self.num_layers * _align(self.rows_bytes, FIELD_ALIGN_BYTES)

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise SpecError(f"layer {layer} is outside 0 to {self.num_layers - 1}; count attention layers only")
        return layer

    def _view(self, buffer: torch.Tensor, offset: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The field at `offset` of every page, as `dtype` of shape `[P, *shape]`."""
        if buffer.dtype != torch.uint8 or buffer.dim() != 2 or buffer.shape[1] != self.page_bytes or not buffer.is_contiguous():
            layout = "contiguous" if buffer.is_contiguous() else "strided"
            asked = f"contiguous torch.uint8 of shape [P, {self.page_bytes}]"
            raise SpecError(f"the buffer is {layout} {buffer.dtype} of shape {tuple(buffer.shape)}, the layout asks for {asked}; pass that")
        return buffer[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape)


def _align(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
