"""`bench offload`, part 1: bytes per second between the pool and host pages, through the tiers' own worker, against one large copy of pinned memory.

Predicted for an H200 on PCIe gen5, before it was measured: the limit is 53 to 57 GB/s each way. Adjacent pages are one copy and reach 98 % of it. Scattered
pages of 320 KiB take 6 us each on the wire; a batch costs the host about 0.5 us a page, a call each 2 us, a tensor copy each 5 us: so batch and each reach 95 %
and torch 80 to 95 %. Smaller pages (fp8, or few layers) part them further.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import torch

from atoll.bench.model import give_back
from atoll.errors import ConfigError
from atoll.kv.layout import PageLayout
from atoll.models.loader import load_config
from atoll.models.random_model import SHAPES
from atoll.offload.base import BlobKind, Completion, Metadata, Span, Transfer
from atoll.offload.base_worker import Regions, record_fence
from atoll.offload.copier import Way
from atoll.offload.host_pages import HostPages
from atoll.offload.stream_copier import ISSUES, Issue
from atoll.offload.worker import TierWorker
from atoll.ops.quant.formats import KVFormat

Order = Literal["adjacent", "scattered"]
ORDERS: tuple[Order, ...] = ("adjacent", "scattered")

LIMIT_BYTES = 1 << 30
WAIT_S = 120.0  # far beyond any copy here; one that takes longer is an error


@dataclass(frozen=True)
class OffloadCopyOptions:
    """What to measure: pages of every shape and format, each way, adjacent and scattered, issued in every way that is here."""

    shapes: tuple[str, ...] = ("tiny",)  # of random_model.SHAPES, or a model's name or path, of which only the config is read
    kv_formats: tuple[str, ...] = ("bf16",)
    page_size: int = 16  # tokens
    transfer_bytes: tuple[int, ...] = (1 << 30,)  # of one transfer
    limit_bytes: int = LIMIT_BYTES  # of the one copy that is the limit
    issues: tuple[Issue, ...] = ISSUES
    rounds: int = 7
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0


@dataclass
class OffloadCopyRow:
    """One way of moving pages of one size. Times are of a whole transfer, medians of the rounds."""

    shape: str
    kv_format: str
    page_size: int  # tokens
    page_bytes: int
    num_pages: int  # of the transfer
    moved_bytes: int
    way: str  # load: host pages to pool, store: back
    order: Order  # scattered: shuffled on both sides
    issue: str  # as stream_copier.ISSUES says; thread on a CPU
    pinned: bool
    rounds: int = 0
    wall_us: float | None = None  # from the call of `run` until `poll` tells of it
    spread: float | None = None  # (longest - shortest) / wall_us
    device_us: float | None = None  # as the completion has it: between two events of the copy stream; on a CPU of the thread's clock
    host_us: float | None = None  # until `run` returns
    limit_gbps: float | None = None  # one copy of `limit_bytes` the same way, on the wall's clock, median of the same rounds
    limit_bytes: int | None = None
    note: str | None = None  # why a time is missing

    @property
    def gbps(self) -> float | None:
        return self.moved_bytes / self.wall_us / 1e3 if self.wall_us else None

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.gbps / self.limit_gbps if self.gbps and self.limit_gbps else None


@dataclass
class OffloadCopyReport:
    """All rows of a run, and what was wrong in it."""

    rows: list[OffloadCopyRow] = field(default_factory=list)
    gate_failures: list[str] = field(default_factory=list)


def run_offload_copies(options: OffloadCopyOptions, on_case: Callable[[list[OffloadCopyRow]], None] = lambda rows: None) -> OffloadCopyReport:
    """Measure every case; `on_case` gets the rows of one shape, format and transfer as soon as they are there.

    Each case is checked first: what is stored, wiped and loaded is the same in every byte. Raises ConfigError for counts out of range, ModelError for a shape
    that is no model, SpecError for a bad format or page size.
    """
    _check_counts(options)
    layouts = {
        (shape, kv_format): _page_layout(shape, options.page_size, cast(KVFormat, kv_format)) for shape in options.shapes for kv_format in options.kv_formats
    }
    report = OffloadCopyReport()
    limit = _Limit(options)
    for (shape, kv_format), layout in layouts.items():
        for transfer_bytes in options.transfer_bytes:
            give_back(options.device)
            case = _Case(layout.page_bytes, max(1, transfer_bytes // layout.page_bytes), options)
            try:
                rows = _measure(case, limit, shape, kv_format, options)
                report.gate_failures += [f"{shape} {kv_format} {issue}: {fault}" for issue, fault in case.faults.items()]
            finally:
                case.close()
            report.rows += rows
            on_case(rows)
    return report


def case_line(row: OffloadCopyRow) -> str:
    """The sizes of a case, of which this is any row."""
    memory = "pinned" if row.pinned else "not pinned"
    return f"{row.shape} {row.kv_format} page {row.page_size}: {row.num_pages} pages of {row.page_bytes} bytes, host pages {memory}"


def copy_line(row: OffloadCopyRow) -> str:
    head = f"  {row.way:<5} {row.order:<9} {row.issue:<6}"
    if row.wall_us is None or row.device_us is None:
        return f"{head}: not measured: {row.note}"
    share = f", {row.share:.1%} of {row.limit_gbps:.2f}" if row.share is not None else ""
    return f"{head}: {row.gbps:7.2f} GB/s{share}; {row.wall_us:9.1f} us, {row.device_us:9.1f} on the copy's clock, {row.host_us:7.1f} to issue"


def _page_layout(shape: str, page_size: int, kv_format: KVFormat) -> PageLayout:
    config = SHAPES.get(shape) or load_config(shape)
    return PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, page_size, kv_format)


def _check_counts(options: OffloadCopyOptions) -> None:
    if not options.transfer_bytes or min(*options.transfer_bytes, options.limit_bytes, options.rounds) < 1:
        raise ConfigError(f"transfer_bytes {options.transfer_bytes} or rounds {options.rounds} holds none, or one below 1; give numbers of 1 or more")
    unknown = set(options.issues) - set(ISSUES)
    if unknown or not options.issues:
        raise ConfigError(f"issues {options.issues} are not all known; use some of {', '.join(ISSUES)}")


class _Limit:
    """One large copy each way: pinned memory of the framework's own on a GPU, plain memory on a CPU."""

    def __init__(self, options: OffloadCopyOptions) -> None:
        self._device = options.device
        self._here = torch.empty(options.limit_bytes, dtype=torch.uint8, device=options.device)
        self._there = torch.empty(options.limit_bytes, dtype=torch.uint8, pin_memory=options.device.type == "cuda")
        # Memory that was never written is not there yet.
        self._here.fill_(1)
        self._there.fill_(2)
        for way in Way:
            self.copy_us(way)

    def copy_us(self, way: Way) -> float:
        target, source = (self._here, self._there) if way is Way.LOAD else (self._there, self._here)
        _synchronize(self._device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize(self._device)
        return (time.perf_counter() - begin) * 1e6


class _Case:
    """A pool, host pages, and a worker for each way to issue copies."""

    def __init__(self, page_bytes: int, num_pages: int, options: OffloadCopyOptions) -> None:
        rand = torch.Generator().manual_seed(options.seed)
        self.num_pages = num_pages
        self.pool = torch.empty(num_pages + 1, page_bytes, dtype=torch.uint8, device=options.device)  # the null page is the first
        device_rand = torch.Generator(options.device).manual_seed(options.seed)
        self.pool.view(torch.int64).random_(generator=device_rand)
        self.host = HostPages.anonymous(num_pages, page_bytes)
        self.places: dict[Order, tuple[list[int], list[int]]] = {
            "adjacent": (list(range(1, num_pages + 1)), list(range(num_pages))),
            "scattered": ((torch.randperm(num_pages, generator=rand) + 1).tolist(), torch.randperm(num_pages, generator=rand).tolist()),
        }
        self.workers: dict[str, TierWorker] = {}
        self.faults: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._generation = 0
        issues: tuple[Issue, ...] = options.issues if options.device.type == "cuda" else ("auto",)
        for issue in issues:
            worker = TierWorker(self.host, issue=issue)
            try:
                worker.register(Regions(self.pool, image_pages=0))
            except ConfigError as error:
                self.refused[issue] = str(error)
                continue
            self.workers[issue if options.device.type == "cuda" else "thread"] = worker

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close(WAIT_S)
        self.host.close()

    def transfer_us(self, issue: str, way: Way, order: Order) -> tuple[float, float, float]:
        """Wall, the copy's own clock, and the call of `run`."""
        worker = self.workers[issue]
        self._generation += 1
        pages, slots = self.places[order]
        spans = tuple(Span(BlobKind.KV, page.to_bytes(16, "little"), (page,)) for page in pages)
        transfers = (Transfer(self._generation, spans, tuple(slots)),)
        metadata = Metadata(self._generation, loads=transfers) if way is Way.LOAD else Metadata(self._generation, stores=transfers)
        _synchronize(self.pool.device)
        begin = time.perf_counter()
        worker.run(metadata, record_fence(self._generation, self.pool.device))
        issued = time.perf_counter()
        completion = _ended(worker)
        wall = time.perf_counter() - begin
        if not completion.ok:
            self.faults[issue] = f"a transfer failed: {completion.error}"
        return wall * 1e6, completion.seconds * 1e6, (issued - begin) * 1e6

    def check(self, issue: str, order: Order) -> None:
        """Store, wipe, load: every byte is there again, and each host page holds what its pool page held."""
        before = self.pool.clone()
        self.transfer_us(issue, Way.STORE, order)
        self.pool.zero_()
        self.transfer_us(issue, Way.LOAD, order)
        self.pool[0] = before[0]
        same_pool = torch.equal(self.pool, before)
        pages, slots = self.places[order]
        same_host = all(torch.equal(self.host.pages[slot], before[page].cpu()) for page, slot in list(zip(pages, slots, strict=True))[:16])
        if not (same_pool and same_host):
            self.faults[issue] = f"{order} pages came back with other bytes"
            self.pool.copy_(before)


def _ended(worker: TierWorker) -> Completion:
    """Looked for without a pause, which would be counted."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        told = worker.poll()
        if told:
            return told[0]
    raise TimeoutError(f"a transfer has not ended within {WAIT_S} s")


def _measure(case: _Case, limit: _Limit, shape: str, kv_format: str, options: OffloadCopyOptions) -> list[OffloadCopyRow]:
    moved_bytes = case.num_pages * case.host.page_bytes
    rows = [
        OffloadCopyRow(shape, kv_format, options.page_size, case.host.page_bytes, case.num_pages, moved_bytes, way.value, order, issue, case.host.is_pinned)
        for issue in [*case.workers, *case.refused]
        for way in Way
        for order in ORDERS
    ]
    for issue in case.workers:
        for order in ORDERS:
            case.check(issue, order)
    timed = [row for row in rows if row.issue in case.workers and row.issue not in case.faults]
    samples: dict[int, list[tuple[float, float, float]]] = {i: [] for i in range(len(timed))}
    limits: dict[str, list[float]] = {way.value: [] for way in Way}
    for i_round in range(options.rounds):
        for way in Way:
            limits[way.value].append(limit.copy_us(way))
        for i in range(len(timed)):
            # The order of variants moves on from round to round, so that drift falls on all alike.
            j = (i + i_round) % len(timed)
            samples[j].append(case.transfer_us(timed[j].issue, Way(timed[j].way), timed[j].order))
    for i, row in enumerate(timed):
        walls, devices, hosts = zip(*samples[i], strict=True)
        row.rounds = options.rounds
        row.wall_us, row.device_us, row.host_us = statistics.median(walls), statistics.median(devices), statistics.median(hosts)
        row.spread = (max(walls) - min(walls)) / row.wall_us
        row.limit_gbps, row.limit_bytes = options.limit_bytes / statistics.median(limits[row.way]) / 1e3, options.limit_bytes
    for row in rows:
        row.note = case.refused.get(row.issue) or case.faults.get(row.issue)
        if row.issue in case.faults:
            row.wall_us = None
    return rows


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
