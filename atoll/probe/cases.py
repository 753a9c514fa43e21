"""Hostile decode problems: real rows where a sequence owns them, and a name for every place where nobody does.

A `Case` is plain data (it can be sent to another process); `make` turns it into the tensors of a `DecodeProblem`. What makes a case hostile:
shuffled page ids, table entries that nobody may dereference (past the end and left of a window), lengths around every edge, strides of
every layout, a page 0 that somebody owns or nobody, shared prefixes, and spike keys at the first, last, page-edge and tile-edge
rows, each the whole answer of one query row, so that an off-by-one cannot hide in a long sequence's average.
"""

from dataclasses import dataclass, replace

import torch

from atoll.ops.attention import DecodeSpec, PagedKV
from atoll.ops.quant.formats import FP8_MAX, is_fp8
from atoll.probe.layouts import Layout, cache_layout, paged_kv

PADDED_LANES = 2  # table columns past the longest sequence
FREED_PAGES = 6
INT_MAX = 2**31 - 1
REGIONS = ("tail", "null", "freed", "left")


@dataclass(frozen=True)
class Case:
    """One decode call to probe, as plain data."""

    spec: DecodeSpec
    seq_lens: tuple[int, ...]
    layout: Layout = "page_major"
    own_page0: bool = False  # page 0 belongs to a sequence; else it is the null page
    share_prefix: bool = False  # every second sequence shares its full pages with the one before, as far as both reach
    first_page_id: int = 1  # pages in use have ids from here on; above 65,535 the pool is sparse and mostly untouched
    max_seq_len: int | None = None  # the plan's bound; far above the lengths it makes many empty splits
    seed: int = 0

    @property
    def name(self) -> str:
        s = self.spec
        v_layout = ".t" if s.v_layout == "transposed" else ""
        parts = [f"{s.kv_format}{v_layout} p{s.page_size} d{s.head_dim} h{s.num_kv_heads} g{s.group_size} q{s.query_len}", self.layout]
        flags = {
            f"w{s.window}": s.window is not None,
            f"cap{s.soft_cap}": s.soft_cap is not None,
            "sinks": s.sinks,
            "full": not s.causal,
            "bi": s.batch_invariant,
            "unmasked": not s.mask_unowned_kv,
            "own0": self.own_page0,
            "shared": self.share_prefix,
            f"ids>{self.first_page_id}": self.first_page_id > 1,
            f"max{self.max_seq_len}": self.max_seq_len is not None,
        }
        return " ".join(parts + [flag for flag, on in flags.items() if on])

    def make(self, device: torch.device | str = "cpu") -> "DecodeProblem":
        return _Maker(self, torch.device(device)).problem()


@dataclass(frozen=True)
class DecodeProblem:
    """The tensors of one case. Every unowned byte is zero until `poison` fills it."""

    case: Case
    q: torch.Tensor  # [B, QL, HQ, D]
    kv: PagedKV
    seq_lens: torch.Tensor  # [B] int32, on the host
    page_table: torch.Tensor  # [B, MP] int32, on the device; hostile entries included
    sinks: torch.Tensor | None  # [HQ] fp32
    pages: tuple[tuple[int, ...], ...]  # each sequence's page ids in order, those left of a window included
    buffer: torch.Tensor  # uint8, everything that kv views but the scales of fp8_tensor
    gaps: torch.Tensor | None  # [buffer] bool: bytes of no row (other layers, row padding); None in a sparse pool
    regions: dict[str, torch.Tensor]  # name in REGIONS -> row ids [n] int64 (page * S + offset); no row is in two

    @property
    def spec(self) -> DecodeSpec:
        return self.case.spec

    @property
    def device(self) -> torch.device:
        return self.q.device

    def row_ids(self, i_b: int) -> torch.Tensor:
        """Row ids of tokens `0 .. seq_len` of one sequence, `[seq_len]` int64 on the device."""
        size = self.spec.page_size
        pages = torch.tensor(self.pages[i_b], dtype=torch.int64)
        ids = (pages[:, None] * size + torch.arange(size)).flatten()
        return ids[: int(self.seq_lens[i_b])].to(self.device)

    def seen(self, i_b: int) -> torch.Tensor:
        """Which keys each query token of a sequence attends to, `[QL, seq_len]` bool, from the definition in DecodeSpec."""
        spec, seq_len = self.spec, int(self.seq_lens[i_b])
        key = torch.arange(seq_len, device=self.device)
        position = seq_len - spec.query_len + torch.arange(spec.query_len, device=self.device)[:, None]
        seen = torch.ones_like(key + position, dtype=torch.bool)
        if spec.causal:
            seen &= key <= position
        if spec.window is not None:
            seen &= key > position - spec.window
        return seen

    def safe_page_table(self) -> torch.Tensor:
        """The table with every entry that holds no owned row named as page 0, for kernels that dereference padded lanes."""
        table = torch.zeros_like(self.page_table)
        for i_b, pages in enumerate(self.pages):
            first = self.spec.window_start(int(self.seq_lens[i_b])) // self.spec.page_size
            table[i_b, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)
        return table


def make_problem(
    spec: DecodeSpec, seq_lens: tuple[int, ...], *, seed: int = 0, device: torch.device | str = "cpu", layout: Layout = "page_major"
) -> DecodeProblem:
    """A problem with the usual hostility; `Case` has the rarer kinds."""
    return Case(spec, tuple(seq_lens), layout=layout, seed=seed).make(device)


def hostile_lengths(page_size: int, *, short: bool = False) -> tuple[int, ...]:
    """Lengths around every edge; `short` leaves out those that only add time."""
    edges = {0, 1, page_size - 1, page_size, page_size + 1, 64, 65, 129}
    if not short:
        edges |= {63, 127, 128, 255, 257, 1000}
    return tuple(sorted(edges))


def row_values(field: torch.Tensor, row_ids: torch.Tensor, page_size: int, *, transposed: bool = False) -> torch.Tensor:
    """A copy of rows of a field, `[n, HKV, ...]`, in an integer dtype of the same width."""
    page, offset = row_ids // page_size, row_ids % page_size
    bits = as_bits(field)
    return bits[page, :, :, offset] if transposed else bits[page, :, offset]


def set_rows(field: torch.Tensor, row_ids: torch.Tensor, page_size: int, bits: torch.Tensor, *, transposed: bool = False) -> None:
    """Write rows of a field, `bits [n, HKV, ...]` or broadcastable to it."""
    page, offset = row_ids // page_size, row_ids % page_size
    target = as_bits(field)
    if transposed:
        target[page, :, :, offset] = bits
    else:
        target[page, :, offset] = bits


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, since not every device copies float8 and a NaN's bits must be kept."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


class _Maker:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.spec, self.device = case, case.spec, device
        self.host = torch.Generator().manual_seed(case.seed)
        self.rand = torch.Generator(device).manual_seed(case.seed)
        self.sparse = case.first_page_id > 1
        self.pages = self._assign_pages()
        used = [page for pages in self.pages for page in pages]
        self.num_pages = max([*used, *self.free_ids]) + 1

    def problem(self) -> DecodeProblem:
        case, spec, device = self.case, self.spec, self.device
        layout = cache_layout(spec, self.num_pages, case.layout)
        # A sparse pool is left as the system gives it: touching all of it would take its full size in memory.
        buffer = (torch.empty if self.sparse else torch.zeros)(layout.num_bytes, dtype=torch.uint8, device=device)
        scales = (torch.tensor([0.7], device=device), torch.tensor([1.3], device=device)) if spec.kv_format == "fp8_tensor" else None
        kv = paged_kv(spec, layout.views(buffer), scales)
        gaps = None
        if not self.sparse:
            mask = torch.ones_like(buffer)
            for view in layout.views(mask).values():
                as_bits(view).zero_()
            gaps = mask.bool()
        problem = DecodeProblem(
            case=case,
            q=self._randn(len(case.seq_lens), spec.query_len, spec.num_q_heads, spec.head_dim).to(spec.q_dtype),
            kv=kv,
            seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
            page_table=self._page_table().to(device),
            sinks=self._randn(spec.num_q_heads) if spec.sinks else None,
            pages=self.pages,
            buffer=buffer,
            gaps=gaps,
            regions=self._regions(),
        )
        self._write_owned(problem)
        return problem

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.rand, device=self.device)

    def _assign_pages(self) -> tuple[tuple[int, ...], ...]:
        """Shuffled ids for every sequence; sets `free_ids`, the pages left over."""
        case, size = self.case, self.spec.page_size
        counts = [-(-n // size) for n in case.seq_lens]
        total = sum(counts) + FREED_PAGES
        ids = (torch.randperm(total, generator=self.host) + case.first_page_id).tolist()
        if case.own_page0:
            ids[0] = 0  # the first non-empty sequence owns it
        pages: list[tuple[int, ...]] = []
        for i_b, count in enumerate(counts):
            own, ids = ids[:count], ids[count:]
            if case.share_prefix and i_b % 2:
                shared = min(case.seq_lens[i_b - 1], case.seq_lens[i_b]) // size
                own = [*pages[-1][:shared], *own[shared:]]
            pages.append(tuple(own))
        self.free_ids = ids
        return tuple(pages)

    def _page_table(self) -> torch.Tensor:
        """Hostile entries wherever no owned row lies: past each sequence's pages, and in every second sequence left of its window."""
        case, size = self.case, self.spec.page_size
        lanes = max(len(pages) for pages in self.pages) + PADDED_LANES
        table = torch.empty(len(self.pages), lanes, dtype=torch.int32)
        others = [pages[0] for pages in self.pages if pages]
        for i_b, pages in enumerate(self.pages):
            neighbour = others[i_b % len(others)] if others else 0
            hostile = torch.tensor([0, -1, INT_MAX, neighbour, self.free_ids[0], self.num_pages, -INT_MAX - 1], dtype=torch.int32)
            table[i_b] = hostile[(torch.arange(lanes) + i_b) % len(hostile)]
            first = self.spec.window_start(case.seq_lens[i_b]) // size if i_b % 2 else 0
            table[i_b, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)
        return table

    def _regions(self) -> dict[str, torch.Tensor]:
        size, lens = self.spec.page_size, self.case.seq_lens
        owned: set[int] = set()
        left: set[int] = set()
        tail: set[int] = set()
        for seq_len, pages in zip(lens, self.pages, strict=True):
            rows = [page * size + offset for page in pages for offset in range(size)]
            start = self.spec.window_start(seq_len)
            owned.update(rows[start:seq_len])
            left.update(rows[:start])
            tail.update(rows[seq_len:])
        freed = set(self.free_ids)
        if self.sparse:
            # Where 16-bit ids or 32-bit byte offsets would wrap to.
            freed |= {page & 0xFFFF for pages in self.pages for page in pages} - {0}
        used = {page for pages in self.pages for page in pages}
        chosen = {
            "tail": tail - owned,
            "null": set() if 0 in used else set(range(size)),
            "freed": {page * size + offset for page in freed - used for offset in range(size)},
            "left": left - owned - tail,
        }
        return {name: torch.tensor(sorted(rows), dtype=torch.int64, device=self.device) for name, rows in chosen.items()}

    def _write_owned(self, problem: DecodeProblem) -> None:
        spec, size = self.spec, self.spec.page_size
        used = sorted({page for pages in self.pages for page in pages})
        if not used:
            return
        row_ids = (torch.tensor(used)[:, None] * size + torch.arange(size)).flatten().to(self.device)
        shape = (row_ids.numel(), spec.num_kv_heads, spec.head_dim)
        k, v = self._randn(*shape), self._randn(*shape)
        index = {page: i for i, page in enumerate(used)}
        for i_b, pages in enumerate(self.pages):
            place = torch.tensor([index[page] for page in pages], dtype=torch.int64)
            self._add_spikes(problem, i_b, (place[:, None] * size + torch.arange(size)).flatten().to(self.device), k, v)
        owned = torch.isin(row_ids, torch.cat([problem.regions[name] for name in REGIONS]), invert=True)
        for field, scale, rows, transposed in (
            (problem.kv.k, problem.kv.k_scale, k, False),
            (problem.kv.v, problem.kv.v_scale, v, spec.v_layout == "transposed"),
        ):
            if scale is not None and spec.kv_format == "fp8_token":
                token_scale = torch.exp(self._randn(*shape[:2]))
                set_rows(scale, row_ids[owned], size, as_bits(token_scale)[owned])
                rows = rows / token_scale[..., None]
            elif scale is not None:
                rows = rows / scale
            if is_fp8(spec.kv_format):
                rows = rows.clamp(-FP8_MAX, FP8_MAX)
            set_rows(field, row_ids[owned], size, as_bits(rows.to(field.dtype))[owned], transposed=transposed)

    def _add_spikes(self, problem: DecodeProblem, i_b: int, place: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Point some keys along one query row each, so that this row's answer is that key's value."""
        spec, seq_len = self.spec, self.case.seq_lens[i_b]
        keys = spike_keys(spec, seq_len)
        heads = spec.num_q_heads
        for i, key in enumerate(keys):
            i_row = i % (spec.query_len * heads)
            i_t, i_h = spec.query_len - 1 - i_row // heads, i_row % heads
            if not problem.seen(i_b)[i_t, key]:
                i_t = spec.query_len - 1 if problem.seen(i_b)[-1, key] else 0
            q = problem.q[i_b, i_t, i_h].float()
            # A score of 12 outweighs 1,000 random keys of unit variance.
            row = (place[key], i_h // spec.group_size)
            k[row] = q * (12.0 / (spec.scale * q.square().sum()))
            v[row] = v[row].sign() * (2.0 + i % 3)


def spike_keys(spec: DecodeSpec, seq_len: int) -> list[int]:
    """The keys where an off-by-one would show: both ends, page edges, tile edges, the edges of halves and quarters (splits)."""
    start = spec.window_start(seq_len)
    edges = {start, seq_len - 1, seq_len - spec.query_len}
    for cut in (spec.page_size, (seq_len - 1) // spec.page_size * spec.page_size, 64, 128, seq_len // 4, seq_len // 2 // 64 * 64, seq_len * 3 // 4):
        edges |= {cut - 1, cut}
    return [key for key in sorted(edges) if start <= key < seq_len]


def with_flags(case: Case, **flags: object) -> Case:
    """The case with other values of spec fields."""
    return replace(case, spec=replace(case.spec, **flags))  # type: ignore[arg-type]
