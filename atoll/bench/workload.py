"""The tensors of one measured decode call: a shared pool of random rows, scattered pages or neighbours, jittered lengths. Knows no clock."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from atoll.bench.shapes import DecodeShape
from atoll.bench.timing import Call
from atoll.kv.layout import PageLayout
from atoll.ops.attention import DecodePlan, PagedKV, decode_attention, plan_decode
from atoll.ops.attention.costs import kv_row_bytes
from atoll.ops.quant.formats import storage_dtype

# How a page table names pages: as a pool in long use does, or as a fresh one does.
PageOrder = Literal["shuffled", "in_order"]

# Between two reads of the same row, a cold run reads this many times the L2's size of other rows: with random replacement about 2 % would survive.
COLD_L2_MULTIPLE = 4
_FILL_ELEMENTS = 1 << 26
_TENSOR_SCALES = (0.7, 1.3)


_CHECKED_SEQUENCES = 3


@dataclass(frozen=True)
class Workload:
    """One shape's call; `tables[c]` names other pages for each copy `c`, so that calls over many copies find no row in a cache."""

    shape: DecodeShape
    q: torch.Tensor  # [B, QL, HQ, D]
    kv: PagedKV
    lengths: list[int]
    tables: torch.Tensor  # [copies, B, MP] int32; no page is named twice; lanes past a sequence's end name page 0

    @functools.cached_property
    def reference(self) -> tuple[list[int], torch.Tensor]:
        """A few sequences, and what copy 0 gives for them in fp32 from the same stored rows, [n, QL, HQ, D]."""
        batch = self.shape.batch
        chosen = sorted({0, batch // 2, batch - 1})[:_CHECKED_SEQUENCES]
        spec = replace(self.shape.spec(), q_dtype=torch.float32)
        plan = plan_decode(spec, [self.lengths[i] for i in chosen], self.tables[0, chosen], backend="reference")
        return chosen, decode_attention(self.q[chosen].float(), self.kv, plan)[0]

    def calls(self, plan: DecodePlan) -> list[Call]:
        """One call per copy, all with the plan's lengths and workspace."""
        out = torch.empty_like(self.q)
        lse = torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.q.device)
        plans = [replace(plan, page_table=table) for table in self.tables]
        return [functools.partial(decode_attention, self.q, self.kv, p, out=out, lse=lse) for p in plans]


class BenchPool:
    """One allocation that every shape's cache is a view of, refilled when the shape's page layout is another one."""

    def __init__(self, shapes: Sequence[DecodeShape], device: torch.device, *, l2_bytes: int = 0, seed: int = 0, page_order: PageOrder = "shuffled") -> None:
        self.device, self.l2_bytes, self.seed, self.page_order = device, l2_bytes, seed, page_order
        self.buffer = torch.empty(pool_bytes(shapes, l2_bytes), dtype=torch.uint8, device=device)
        self._rand = torch.Generator(device).manual_seed(seed)
        self._layout: PageLayout | None = None
        self._kv: PagedKV | None = None

    def workload(self, shape: DecodeShape, *, cold: bool = False) -> Workload:
        kv = self._cache(shape)
        copies = cold_copies(shape, self.l2_bytes) if cold else 1
        lengths = shape.lengths(self.seed)
        lanes = torch.arange(shape.lanes, device=self.device)
        pages = torch.arange(1, kv.num_pages, device=self.device)
        if self.page_order == "shuffled":
            pages = pages[torch.randperm(kv.num_pages - 1, generator=self._rand, device=self.device)]
        used = lanes[None, :] * shape.page_size < torch.tensor(lengths, device=self.device)[:, None]  # [B, MP]
        tables = pages[: copies * shape.batch * shape.lanes].to(torch.int32).view(copies, shape.batch, shape.lanes) * used
        spec = shape.spec()
        q = torch.randn(shape.batch, spec.query_len, spec.num_q_heads, spec.head_dim, generator=self._rand, device=self.device).to(spec.q_dtype)
        return Workload(shape, q, kv, lengths, tables)

    def _cache(self, shape: DecodeShape) -> PagedKV:
        layout = page_layout(shape)
        if self._kv is None or layout != self._layout:
            num_pages = self.buffer.numel() // layout.page_bytes
            pages = self.buffer[: num_pages * layout.page_bytes].view(num_pages, layout.page_bytes)
            scales: tuple[torch.Tensor | None, ...] = (None, None)
            if shape.kv_format == "fp8_tensor":
                scales = tuple(torch.tensor([scale], device=self.device) for scale in _TENSOR_SCALES)
            self._fill(storage_dtype(shape.kv_format))
            self._kv, self._layout = layout.layer_kv(pages, 0, *scales), layout
            if layout.has_scale_rows:
                for scale in (self._kv.k_scale, self._kv.v_scale):
                    assert scale is not None
                    scale.uniform_(0.5, 1.5, generator=self._rand)
        return self._kv

    def _fill(self, dtype: torch.dtype) -> None:
        """Normal random values over the whole buffer, a slice at a time to bound the memory."""
        rows = self.buffer[: self.buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        scratch = torch.empty(min(_FILL_ELEMENTS, rows.numel()), dtype=torch.float32, device=self.device)
        for part in rows.split(scratch.numel()):
            part.copy_(scratch[: part.numel()].normal_(generator=self._rand))


def pool_bytes(shapes: Sequence[DecodeShape], l2_bytes: int) -> int:
    """Of one allocation that each of the shapes fits into."""
    return max((1 + cold_copies(shape, l2_bytes) * shape.batch * shape.lanes) * page_layout(shape).page_bytes for shape in shapes)


def cold_copies(shape: DecodeShape, l2_bytes: int) -> int:
    """Tables that a cold run goes through."""
    call_bytes = shape.batch * (shape.ctx - 255) * kv_row_bytes(shape.spec())
    return max(1, math.ceil(COLD_L2_MULTIPLE * l2_bytes / call_bytes))


def page_layout(shape: DecodeShape) -> PageLayout:
    """A pool of one layer."""
    return PageLayout(1, shape.heads.num_kv_heads, shape.heads.head_dim, shape.page_size, shape.kv_format)


def unowned_rows(work: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of copy 0 where unowned rows lie (page 0, then each sequence's last page), and which rows of them: `[n]`, `[n, S]` bool."""
    size, device = work.shape.page_size, work.q.device
    lengths = torch.tensor(work.lengths, device=device)
    last_lane = (lengths - 1) // size
    last = work.tables[0].gather(1, last_lane[:, None]).flatten().long()
    tail = torch.arange(size, device=device)[None, :] >= (lengths - last_lane * size)[:, None]
    pages = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), last])
    return pages, torch.cat([torch.ones(1, size, dtype=torch.bool, device=device), tail])


def poison_rows(kv: PagedKV, pages: torch.Tensor, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Set whole rows of K, V and per-token scales to 0xFF bytes (NaN in every format); returns what `restore_rows` needs."""
    saved = []
    for field in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if field is None or field.dim() < 2:
            continue
        bits = field.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[field.element_size()])
        before = bits[pages]  # [n, HKV, S, ...]
        saved.append((bits, before))
        mask = rows.view(rows.shape[0], 1, rows.shape[1], *[1] * (bits.dim() - 3))
        bits[pages] = torch.where(mask, torch.full_like(before, -1 if before.dtype != torch.uint8 else 0xFF), before)
    return saved


def restore_rows(saved: list[tuple[torch.Tensor, torch.Tensor]], pages: torch.Tensor) -> None:
    for bits, before in saved:
        bits[pages] = before
