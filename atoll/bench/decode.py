"""`bench decode`: each case is checked, then masked, unmasked and others' kernels are timed interleaved in one run."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from atoll.bench.compile import Variant, compile_variants, default_config
from atoll.bench.gate import above_limit, own_fault, relative_error
from atoll.bench.peers import Adapter, DeviceLostError, PeerKey, compile_peers, peer_calls, peer_key
from atoll.bench.report import variant_key
from atoll.bench.rows import DecodeRow
from atoll.bench.shapes import DecodeShape, ShapeSet, select_shapes
from atoll.bench.timing import ROUNDS, Call, Timing, estimate_us, l2_bytes, measure_read_gbps, repeat_calls, time_interleaved
from atoll.bench.workload import BenchPool, PageOrder, Workload
from atoll.errors import BackendError, ConfigError
from atoll.ops.attention import DecodeConfig, choose_backend, decode_attention, plan_decode
from atoll.ops.attention.costs import decode_costs

L2State = Literal["warm", "cold"]

# A kernel's rate counts for the roof only where its rows cannot have come from a cache.
_FAR_ABOVE_L2_BYTES = 1 << 30
_MAX_PEER_ERROR = 0.1


@dataclass(frozen=True)
class DecodeBenchOptions:
    """What to measure and how long."""

    shapes: ShapeSet = "quick"
    name_filter: str = ""  # substring of case names
    limit: int | None = None  # cases
    backend: str = "auto"
    beside: tuple[str, ...] = ()  # backends of ours that are timed beside it, masked
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # name or module:function -> the function
    l2: tuple[L2State, ...] = ("warm",)
    page_order: PageOrder = "shuffled"
    unmasked: bool = True
    noise: bool = True  # time the masked variant a second time
    rounds: int = ROUNDS
    jobs: int | None = None  # processes that compile
    budget_s: float | None = None  # no case is begun after this
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    run: str | None = None  # noted in every row
    measured: Collection[tuple[str, str | None]] = frozenset()  # (case, L2 state) that an earlier command of the run has rows of

    def states(self, shape: DecodeShape) -> list[L2State | None]:
        """The L2 states in which the case is still to be measured."""
        wanted: tuple[L2State | None, ...] = self.l2 if self.device.type == "cuda" else (None,)
        return [l2 for l2 in wanted if (shape.name, l2) not in self.measured]


@dataclass
class DecodeReport:
    """All rows of a run, and what could not be measured."""

    rows: list[DecodeRow] = field(default_factory=list)
    read_gbps: float | None = None  # of a plain reduction
    gate_failures: list[str] = field(default_factory=list)
    num_left_out: int = 0  # cases that the time budget or an interrupt left out
    interrupted: bool = False
    lost: str | None = None  # how a peer broke the device, which ended the run

    @property
    def roof_gbps(self) -> float | None:
        """The best rate that anything reached in this run: a plain reduction, or a kernel whose rows are too many for a cache."""
        kernels = [row.gbps for row in self.rows if row.gbps is not None and row.l2 is not None and row.bytes > _FAR_ABOVE_L2_BYTES]
        known = [rate for rate in (self.read_gbps, *kernels) if rate is not None]
        return max(known, default=None)


def run_decode(options: DecodeBenchOptions, on_case: Callable[[list[DecodeRow]], None] = lambda rows: None) -> DecodeReport:
    """Measure every chosen case that `options.measured` lacks; `on_case` gets a case's rows as soon as they are there.

    An interrupt ends the run early and keeps what was measured. Raises ConfigError when no case matches, BackendError when the backend refuses one.
    """
    chosen = select_shapes(options.shapes, name_filter=options.name_filter, limit=options.limit)
    if not chosen:
        raise ConfigError(f"no case of --shapes {options.shapes} contains {options.name_filter!r}; names look like 35b-tp1/bf16/p16/q1/16x1024")
    begin = time.monotonic()
    report = DecodeReport()
    chosen = [shape for shape in chosen if options.states(shape)]
    if not chosen:
        return report
    report.read_gbps = measure_read_gbps(options.device)
    # Cases of one page layout together: each new layout refills the pool.
    chosen.sort(key=lambda shape: (shape.heads.name, shape.kv_format, shape.page_size))
    refused = _compile(chosen, options)
    cold_bytes = l2_bytes(options.device) if "cold" in options.l2 else 0
    pool = BenchPool(chosen, options.device, l2_bytes=cold_bytes, seed=options.seed, page_order=options.page_order)
    try:
        for shape in chosen:
            if report.lost is not None or (options.budget_s is not None and time.monotonic() - begin > options.budget_s):
                break
            try:
                rows = _CaseRun(shape, options, pool, report, refused).measure()
            except Exception as error:
                error.add_note(f"while {shape.name} was measured; the cases before it are kept")
                raise
            report.rows += rows
            for row in rows:
                row.roof_gbps = report.roof_gbps
            on_case(rows)
    except KeyboardInterrupt:
        report.interrupted = True
    report.num_left_out = len(chosen) - len({row.case for row in report.rows})
    return report


def config_name(config: DecodeConfig) -> str:
    """Short, for tables: tile, splits, warps, stages, then whatever else is not as usual."""
    usual = DecodeConfig()
    rest = [f.name for f in fields(config) if f.name not in ("tile", "num_splits", "num_warps", "num_stages")]
    unusual = [f".{name}={getattr(config, name)}" for name in rest if getattr(config, name) != getattr(usual, name)]
    return f"t{config.tile}.ns{config.num_splits}.w{config.num_warps}.s{config.num_stages}{''.join(unusual)}"


def _name(row: DecodeRow) -> str:
    return " ".join(map(str, variant_key(row)))


def _flags(options: DecodeBenchOptions) -> tuple[bool, ...]:
    return (True, False) if options.unmasked else (True,)


def _compile(shapes: list[DecodeShape], options: DecodeBenchOptions) -> dict[PeerKey, str]:
    """Build all kernels before the first is timed; returns why peers refuse or fail. Raises BackendError where one of ours does not fit."""
    if options.device.type != "cuda":
        return {}
    variants = []
    for shape in shapes:
        for backend in (options.backend, *options.beside):
            try:
                name, _, _ = choose_backend(shape.spec(), options.device, backend)
            except BackendError:
                if backend == options.backend:
                    raise
                continue
            for flag in _flags(options) if backend == options.backend else (True,):
                config = default_config(shape, options.device, name, mask_unowned_kv=flag)
                variants.append(Variant(shape, flag, config, name))
    for variant, reason in compile_variants(variants, jobs=options.jobs).items():
        raise BackendError(f"{variant.backend} with {variant.config} does not fit the device for {variant.shape.name}: {reason}; change its tuning")
    return compile_peers(options.adapters, shapes, options.device, jobs=options.jobs)


_Variant = tuple[DecodeRow, list[Call]]


class _CaseRun:
    """One case from gate to rows."""

    def __init__(self, shape: DecodeShape, options: DecodeBenchOptions, pool: BenchPool, report: DecodeReport, refused: Mapping[PeerKey, str]) -> None:
        self.shape, self.options, self.pool, self.report, self.refused = shape, options, pool, report, refused
        self.device = options.device

    def measure(self) -> list[DecodeRow]:
        return [row for l2 in self.options.states(self.shape) if self.report.lost is None for row in self._measure(l2)]

    def _measure(self, l2: L2State | None) -> list[DecodeRow]:
        work = self.pool.workload(self.shape, cold=l2 == "cold")
        found = [*self._own(work, l2), *self._adapters(work, l2)]
        if self.report.lost is not None:
            for row, _ in found:
                row.note = row.note or self.report.lost
        calls = {_name(row): own_calls for row, own_calls in found if row.note is None}
        rows = {_name(row): row for row, _ in found}
        if calls:
            for name, timing in self._time(calls).items():
                rows[name].time_us, rows[name].spread = timing.median_us, timing.spread
        return list(rows.values())

    def _time(self, calls: dict[str, list[Call]]) -> dict[str, Timing]:
        graph_calls = {key: repeat_calls(own, estimate_us(own[0], self.device)) for key, own in calls.items()}
        return time_interleaved(graph_calls, self.device, rounds=self.options.rounds)

    def _own(self, work: Workload, l2: L2State | None) -> list[_Variant]:
        options = self.options
        found = self._own_variants(work, l2, options.backend, _flags(options), noise=options.noise)
        for backend in options.beside:
            try:
                beside = self._own_variants(work, l2, backend, (True,), noise=False)
            except BackendError as error:
                beside = [(self._row(work, backend, True, l2), [])]
                beside[0][0].note = str(error)
            # "auto" may have chosen it.
            found += [(row, calls) for row, calls in beside if row.backend != found[0][0].backend]
        return found

    def _own_variants(self, work: Workload, l2: L2State | None, backend: str, flags: Sequence[bool], *, noise: bool) -> list[_Variant]:
        found: list[_Variant] = []
        for flag in flags:
            spec = self.shape.spec(mask_unowned_kv=flag)
            plan = plan_decode(spec, work.lengths, work.tables[0], backend=backend, max_seq_len=self.shape.ctx)
            calls = work.calls(plan)
            row = self._row(work, plan.backend, flag, l2)
            row.config = config_name(plan.config)
            out, _ = decode_attention(work.q, work.kv, plan)
            row.rel_error, fault = own_fault(work, plan, out)
            if fault is not None:
                self._fail(row, fault)
            found.append((row, calls))
            if flag and noise:
                again = self._row(work, plan.backend, flag, l2)
                again.repeat, again.config, again.rel_error, again.note = 1, row.config, row.rel_error, row.note
                found.append((again, calls))
        return found

    def _adapters(self, work: Workload, l2: L2State | None) -> list[_Variant]:
        """Others' kernels, on the same tables: one that refuses or fails costs its own row."""
        found: list[_Variant] = []
        for name, adapter in self.options.adapters.items():
            row, calls = self._row(work, name, None, l2), list[Call]()
            row.note = self.refused.get(peer_key(name, self.shape))
            try:
                if row.note is None:
                    calls, out = peer_calls(adapter, work)
                    self._gate_peer(row, work, out)
            except DeviceLostError as error:
                row.note = str(error)
                self.report.lost = f"{name} broke the device: {error}"
            except BackendError as error:
                row.note = str(error)
            found.append((row, calls))
            if self.report.lost is not None:
                break
        return found

    def _row(self, work: Workload, backend: str, flag: bool | None, l2: L2State | None) -> DecodeRow:
        costs = decode_costs(self.shape.spec(), work.lengths)
        shape, order = self.shape, self.options.page_order
        return DecodeRow(shape.name, shape.batch, shape.ctx, backend, flag, 0, l2, costs.bytes, costs.flops, page_order=order, run=self.options.run)

    def _gate_peer(self, row: DecodeRow, work: Workload, out: torch.Tensor) -> None:
        """Others may trade accuracy for speed (fp8 Q and P: 3 %): their error is told, not judged, unless it is no answer at all."""
        row.rel_error = relative_error(work, out)
        if not row.rel_error <= _MAX_PEER_ERROR:
            self._fail(row, above_limit(row.rel_error, _MAX_PEER_ERROR))

    def _fail(self, row: DecodeRow, reason: str) -> None:
        row.note = reason
        self.report.gate_failures.append(f"{row.case} {row.backend} mask_unowned_kv={row.mask_unowned_kv}: {reason}")
