"""The page pool: one uint8 buffer of all pages and its books; knows no model and no request."""

from collections.abc import Callable, Iterable, Sequence

import torch

from atoll.errors import ConfigError, PoolError
from atoll.kv.fills import Fill, check_fill, fill_buffer
from atoll.kv.layout import PageLayout
from atoll.kv.ledger import PageLedger, check_num_pages
from atoll.ops.attention.spec import PagedKV


class PagePool:
    """Pages for the K/V rows of all attention layers: `buffer` [P, page_bytes] holds them, `ledger` says who holds which.

    `fill` is what every page, the null page too, holds before its first write. Attention reads owned rows only, so no choice changes a result; all but
    "zero" are there to prove that. `atoll.kv.fills.fill_buffer` says what each is.

    Raises ConfigError for a bad `num_pages` or `fill`, PoolError when the device has not enough memory.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: torch.device | str,
        fill: Fill = "zero",
        *,
        seed: int = 0,
        on_free: Callable[[int], None] | None = None,  # as for PageLedger
    ) -> None:
        check_fill(fill)
        check_num_pages(num_pages)
        self.layout = layout
        self.buffer = _make_buffer(layout, num_pages, torch.device(device))  # [P, page_bytes] uint8
        self.ledger = PageLedger(num_pages, on_free)
        fill_buffer(self.buffer, fill, layout.fields, seed=seed)
        # One scale per layer, [L] fp32, for fp8_tensor only. They are not part of any page, and may be rewritten in place while no page holds rows.
        self.k_scales: torch.Tensor | None = None
        self.v_scales: torch.Tensor | None = None
        if layout.kv_format == "fp8_tensor":
            self.k_scales = torch.ones(layout.num_layers, dtype=torch.float32, device=self.device)
            self.v_scales = torch.ones(layout.num_layers, dtype=torch.float32, device=self.device)
        self._layers = [layout.layer_kv(self.buffer, layer, _one(self.k_scales, layer), _one(self.v_scales, layer)) for layer in range(layout.num_layers)]

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def num_pages(self) -> int:
        """All pages, the null page included."""
        return self.ledger.num_pages

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer."""
        return self.num_pages * self.layout.page_bytes

    def layer_kv(self, layer: int) -> PagedKV:
        """One attention layer's cache: views of the buffer, the same object at every call."""
        if not 0 <= layer < self.layout.num_layers:
            raise PoolError(f"layer {layer} is outside 0 to {self.layout.num_layers - 1}; count attention layers only")
        return self._layers[layer]

    def clear(self, pages: Sequence[int]) -> None:
        """Zero whole pages, all layers at once, in one operation on the current stream. The books do not change."""
        if pages:
            # By words of 8 bytes: the fill takes one element at a time.
            self.buffer.view(torch.int64).index_fill_(0, self._index(pages), 0)

    def poison(self, pages: Sequence[int], fill: Fill, *, seed: int = 0) -> None:
        """Overwrite whole pages with a fill pattern, whoever holds them. The books do not change."""
        check_fill(fill)
        if pages:
            spans = torch.empty((len(pages), self.layout.page_bytes), dtype=torch.uint8, device=self.device)
            self.buffer[self._index(pages)] = fill_buffer(spans, fill, self.layout.fields, seed=seed)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Recount the books from scratch; see PageLedger.check. Reads no page, so it does not wait for the device."""
        self.ledger.check(held)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        """Page ids as a device tensor, without waiting for the device."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise PoolError(f"page {page} is outside 0 to {self.num_pages - 1}; use ids of this pool")
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return index.to(self.device, non_blocking=True)


def num_pages_for_bytes(layout: PageLayout, num_bytes: int) -> int:
    """Pages, the null page included, that fit in `num_bytes` of memory.

    Raises ConfigError when not even the null page and one more fit.
    """
    num_pages = num_bytes // layout.page_bytes
    if num_pages < 2:
        raise ConfigError(f"{num_bytes} bytes hold {num_pages} pages of {layout.page_bytes} bytes, 2 is the least; give {2 * layout.page_bytes} bytes or more")
    return num_pages


def _make_buffer(layout: PageLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch has one class for "no memory" on a GPU, and none on a CPU
        num_bytes = num_pages * layout.page_bytes
        raise PoolError(f"{num_pages} pages of {layout.page_bytes} bytes ({num_bytes} bytes) cannot be allocated on {device}; use fewer pages") from error


def _one(scales: torch.Tensor | None, layer: int) -> torch.Tensor | None:
    """A layer's scale as a view [1]."""
    return None if scales is None else scales[layer : layer + 1]
