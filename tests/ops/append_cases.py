"""The hostile cases of append_kv, and the comparison of two ways to write them."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from atoll.ops.attention import PagedKV
from atoll.ops.attention.append import append_kv_torch
from tests.ops.oracle import DTYPES, FORMATS

NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE = 7, 2, 4
LAYOUTS = ("hnd", "nhd", "page-major", "transposed", "transposed page-major")
Append = Callable[[PagedKV, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class AppendCase:
    """One call: where the rows lie, and what is in them. The same every time it is made."""

    kv_format: str
    layout: str
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kv_format} {self.layout} D{self.head_dim} {str(self.dtype).removeprefix('torch.')}"

    def cache(self, device: str = "cpu") -> PagedKV:
        """Pages that hold 0x5A everywhere, so that a stray write shows."""
        shape = (NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, self.head_dim)
        dtype = DTYPES[self.kv_format]
        k = _pages(shape, "page-major" if self.layout.endswith("page-major") else self.layout, dtype, device)
        transposed = self.layout.startswith("transposed")
        v = _pages((*shape[:2], self.head_dim, PAGE_SIZE), self.layout, dtype, device) if transposed else _pages(shape, self.layout, dtype, device)
        scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.kv_format == "fp8_tensor":
            scales = (torch.tensor([0.5], device=device), torch.tensor([0.03], device=device))
        elif self.kv_format == "fp8_token":
            scales = tuple(torch.full((*shape[:2], 2 * PAGE_SIZE), 5.0, device=device)[:, :, ::2] for _ in "kv")  # type: ignore[assignment]
        return PagedKV(self.kv_format, k, v, *scales, "transposed" if transposed else "plain")  # type: ignore[arg-type]

    def rows(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows with NaN, Inf, zeros, huge and tiny values, at odd strides; slots in no order, some of them -1."""
        rng = torch.Generator().manual_seed(self.head_dim)
        slots = torch.tensor([9, -1, 27, 0, 3, 14, -1, 11, 20, 5, 6])
        shape = (2, len(slots), 2 * NUM_KV_HEADS, self.head_dim)
        # Over the whole range of e4m3fn, subnormals included.
        rows = (torch.randn(shape, generator=rng) * torch.exp2(torch.randint(-12, 9, shape, generator=rng))).to(self.dtype)
        rows[:, 0, :, 0] = math.nan
        rows[:, 2] = math.nan
        rows[:, 3, :, -1] = -math.inf
        rows[:, 4] = 0.0
        rows[:, 5, 0] *= 1e4
        rows[:, 5, 2, 0] = torch.finfo(self.dtype).max
        rows[:, 7, :, 0] = torch.finfo(self.dtype).smallest_normal
        rows[:, 8] = torch.finfo(self.dtype).smallest_normal
        rows[0, 9, :, 0] = math.inf
        k, v = rows.to(device)[:, :, ::2]
        return k, v, slots.to(device)


def _pages(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A view of pages full of 0x5A: heads or tokens first, or with the fields of other layers between two pages."""
    p, a, b, c = shape
    gap = 3 if layout.endswith("page-major") else 1
    stored = torch.full((p, gap, a * b * c * dtype.itemsize), 0x5A, dtype=torch.uint8, device=device).view(dtype)[:, gap // 2]
    return stored.view(p, b, a, c).transpose(1, 2) if layout == "nhd" else stored.view(shape)


def all_cases(interpreted: bool) -> Iterator[AppendCase]:
    for kv_format, layout, head_dim in itertools.product(FORMATS, LAYOUTS, (8, 20)):
        yield AppendCase(kv_format, layout, head_dim, torch.bfloat16)
    for kv_format, dtype in itertools.product(FORMATS, (torch.float16, torch.float32)):
        # Triton 3.6's interpreter truncates to bf16, where a GPU rounds to the nearest.
        if kv_format != "bf16" or not interpreted:
            yield AppendCase(kv_format, "hnd", 8, dtype)


def differences(case: AppendCase, append: Append, device: str = "cpu") -> list[str]:
    """The tensors of the cache that `append` leaves otherwise than PyTorch does, any NaN being as good as another."""
    want, got = case.cache(), case.cache(device)
    append_kv_torch(want, *case.rows())
    append(got, *case.rows(device))
    pairs = {name: (getattr(want, name), getattr(got, name)) for name in ("k", "v", "k_scale", "v_scale")}
    return [name for name, (a, b) in pairs.items() if a is not None and not _equal(a, b)]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of the whole storage, gaps included."""
    # Flattened before the copy from a GPU, which keeps no gaps.
    a, b = (torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).cpu().float() for x in (a, b))
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())
