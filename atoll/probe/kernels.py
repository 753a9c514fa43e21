"""The probe of one decode kernel: fill every place that nobody owns, run again, and compare bit by bit.

Three questions a case: is the clean answer right (against `oracle`); do unowned bytes change a bit of it (the leaks); does NaN in an owned
row reach exactly the query rows that attend to it (the positive control: a kernel that swallows NaN would hide a broken model).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from atoll.errors import BackendError
from atoll.probe.adapters import Adapter, Result, Run
from atoll.probe.cases import Case, DecodeProblem, as_bits
from atoll.probe.oracle import ErrorReport, compare
from atoll.probe.poison import FILLS, fill_tensor, parts_of, places, poison, poison_cache, poison_rows, saved_rows
from atoll.probe.watch import OutOfRangeError

# A neighbour's rows lie where `freed` rows may lie too, so that two fills say enough and save a third of the runs.
_NEIGHBOUR_FILLS = ("nan", "random")


@dataclass(frozen=True)
class Leak:
    """One fill of one place that changed the answer."""

    fill: str
    place: str
    rows: int  # (sequence, query token, query head) rows of out or lse that changed
    total: int


@dataclass(frozen=True)
class ControlFailure:
    """NaN in owned rows that did not reach exactly its readers."""

    part: str
    token: str
    missed: int  # readers that stayed finite: NaN was swallowed
    reached: int  # rows that turned NaN though they do not attend to it


@dataclass(frozen=True)
class CaseReport:
    """What one case showed of one kernel."""

    case: str
    refusal: str | None = None  # why the kernel did not take the case; then nothing below was measured
    failure: str | None = None  # the exception that it raised, or what is wrong with the shape of its answer; the same
    out_of_range: str | None = None  # what it touched outside its buffers (found in an interpreter); the same
    leaks: tuple[Leak, ...] = ()
    error: ErrorReport | None = None
    accurate: bool = True
    control: tuple[ControlFailure, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """`refused`, `failed`, `out of range`, `leak`, `wrong`, `control` or `clean`; the first that holds."""
        if self.refusal is not None:
            return "refused"
        if self.failure is not None:
            return "failed"
        if self.out_of_range is not None:
            return "out of range"
        if self.leaks:
            return "leak"
        if not self.accurate:
            return "wrong"
        return "control" if self.control else "clean"

    @property
    def leaked_rows(self) -> int:
        """Rows changed by the worst fill."""
        return max((leak.rows for leak in self.leaks), default=0)


def probe_backend(
    adapter: Adapter,
    cases: Iterable[Case],
    *,
    device: torch.device | str = "cpu",
    fills: Sequence[str] = FILLS,
    control: bool = True,
    tolerance: float = 1.0,
    on_case: Callable[[CaseReport], None] | None = None,
) -> list[CaseReport]:
    """Probe an adapter with every case; `on_case` is told of each report as it comes (progress bars)."""
    reports = []
    for case in cases:
        reports.append(probe_case(adapter, case, device=device, fills=fills, control=control, tolerance=tolerance))
        if on_case is not None:
            on_case(reports[-1])
    return reports


def probe_case(
    adapter: Adapter,
    case: Case,
    *,
    device: torch.device | str = "cpu",
    fills: Sequence[str] = FILLS,
    control: bool = True,
    tolerance: float = 1.0,
) -> CaseReport:
    """Probe one case. `tolerance` multiplies the error bound, for kernels that compute in fp8."""
    started = time.perf_counter()
    problem = case.make(device)
    try:
        run = adapter(problem)
        poison_everything(problem, run, "zero", seed=case.seed)
        clean = _copy(_checked(run(), problem))
        error = compare(problem, *clean)
        leaks = tuple(leak for fill in fills for leak in find_leaks(problem, run, clean, fill, seed=case.seed + 1))
        poison_everything(problem, run, "zero", seed=case.seed)
        failures = tuple(check_control(problem, run)) if control else ()
    except BackendError as refusal:
        return CaseReport(case.name, refusal=str(refusal))
    except OutOfRangeError as stray:
        return CaseReport(case.name, out_of_range=str(stray))
    except Exception as fault:  # noqa: BLE001 - whatever somebody else's kernel raises ends this case alone
        return CaseReport(case.name, failure=f"{type(fault).__name__}: {fault}")
    return CaseReport(
        case.name,
        leaks=leaks,
        error=error,
        accurate=error.ratio <= tolerance,
        control=failures,
        seconds=time.perf_counter() - started,
    )


def poison_everything(problem: DecodeProblem, run: Callable[[], Result], fill: str, seed: int) -> None:
    """The whole cache but owned rows, the workspace and the outputs."""
    poison_cache(problem, fill, seed)
    for tensor in _scratch(run).values():
        for part in tensor:
            fill_tensor(fill, part, seed)


def find_leaks(problem: DecodeProblem, run: Callable[[], Result], clean: Result, fill: str, seed: int) -> Iterator[Leak]:
    """Fill every place at once; only if a bit changes, fill one at a time to name those that leak."""
    poison_everything(problem, run, fill, seed)
    changed = changed_rows(clean, run())
    total = changed.numel()
    if changed.any():
        named = False
        for place in [*places(problem), *(name for name, tensors in _scratch(run).items() if tensors)]:
            poison_everything(problem, run, "zero", seed)
            if place in ("workspace", "output"):
                for tensor in _scratch(run)[place]:
                    fill_tensor(fill, tensor, seed)
            else:
                poison(problem, fill, place, seed)
            rows = int(changed_rows(clean, run()).sum())
            if rows:
                named = True
                yield Leak(fill, place, rows, total)
        if not named:
            yield Leak(fill, "all together", int(changed.sum()), total)
        poison_everything(problem, run, "zero", seed)
    if fill in _NEIGHBOUR_FILLS:
        yield from _neighbour_leaks(problem, run, clean, fill, seed)


def _neighbour_leaks(problem: DecodeProblem, run: Callable[[], Result], clean: Result, fill: str, seed: int) -> Iterator[Leak]:
    """Rows that another sequence owns are unowned too: fill those of every second sequence and compare the rest."""
    batch = len(problem.pages)
    if batch < 2:
        return
    rows_of = [problem.row_ids(i_b)[problem.spec.window_start(int(problem.seq_lens[i_b])) :] for i_b in range(batch)]
    for parity in (0, 1):
        filled = torch.cat([rows for i_b, rows in enumerate(rows_of) if i_b % 2 == parity])
        kept = torch.cat([rows for i_b, rows in enumerate(rows_of) if i_b % 2 != parity])
        filled = filled[torch.isin(filled, kept, invert=True)].unique()
        if not filled.numel() or not kept.numel():
            continue
        with saved_rows(problem, filled, parts_of(problem)):
            for part in parts_of(problem):
                poison_rows(problem, filled, part, fill, seed)
            changed = changed_rows(clean, run())[1 - parity :: 2]
        if changed.any():
            yield Leak(fill, "neighbour", int(changed.sum()), changed.numel())


def check_control(problem: DecodeProblem, run: Callable[[], Result]) -> Iterator[ControlFailure]:
    """NaN in one owned row of every sequence: first, middle and last owned token, each part in turn."""
    spec = problem.spec
    for token in ("first", "middle", "last"):
        chosen = _owned_tokens(problem, token)
        if not chosen:
            continue
        row_ids = torch.stack([problem.row_ids(i_b)[at] for i_b, at in chosen.items()]).unique()
        readers = torch.zeros(problem.q.shape[:3], dtype=torch.bool, device=problem.device)
        for i_b in range(len(problem.pages)):
            hit = torch.isin(problem.row_ids(i_b), row_ids)
            readers[i_b] = (problem.seen(i_b) & hit).any(-1)[:, None].expand(-1, spec.num_q_heads)
        for part in parts_of(problem):
            with saved_rows(problem, row_ids, [part]):
                poison_rows(problem, row_ids, part, "nan")
                out, lse = run()
            is_nan = out.isnan().all(-1)
            any_nan = out.isnan().any(-1)
            if lse is not None:
                any_nan |= lse.isnan()
                if part in ("k", "k_scale"):
                    is_nan &= lse.isnan()
            missed = int((readers & ~is_nan).sum())
            reached = int((any_nan & ~readers).sum())
            if missed or reached:
                yield ControlFailure(part, token, missed, reached)


def _owned_tokens(problem: DecodeProblem, token: str) -> dict[int, int]:
    chosen = {}
    for i_b, seq_len in enumerate(problem.seq_lens.tolist()):
        start = problem.spec.window_start(seq_len)
        if seq_len > start:
            chosen[i_b] = {"first": start, "middle": (start + seq_len) // 2, "last": seq_len - 1}[token]
    return chosen


def changed_rows(before: Result, after: Result) -> torch.Tensor:
    """Which `[B, QL, HQ]` rows of out or lse differ in any bit."""
    changed = (as_bits(before[0]) != as_bits(after[0].contiguous())).any(-1)
    if before[1] is not None and after[1] is not None:
        changed |= as_bits(before[1]) != as_bits(after[1].contiguous())
    return changed


def summary_rows(reports: Iterable[CaseReport]) -> list[dict[str, object]]:
    """One row for each leak, wrong answer, failed control or refusal, for tables and JSON."""
    rows: list[dict[str, object]] = []
    for report in reports:
        if report.refusal is not None:
            rows.append({"case": report.case, "status": "refused", "detail": report.refusal})
        if report.failure is not None:
            rows.append({"case": report.case, "status": "failed", "detail": report.failure})
        if report.out_of_range is not None:
            rows.append({"case": report.case, "status": "out of range", "detail": report.out_of_range})
        rows += [{"case": report.case, "status": "leak", "fill": k.fill, "place": k.place, "rows": k.rows, "total": k.total} for k in report.leaks]
        if not report.accurate and report.error is not None:
            detail = f"error {report.error.max_error:.3g} is {report.error.ratio:.2f} x the bound"
            rows.append({"case": report.case, "status": "wrong", "place": report.error.output, "detail": detail})
        rows += [
            {
                "case": report.case,
                "status": "control",
                "place": f"owned {c.part}, {c.token} token",
                "detail": f"{c.missed} readers missed, {c.reached} others reached",
            }
            for c in report.control
        ]
    return rows


def _scratch(run: Callable[[], Result]) -> dict[str, tuple[torch.Tensor, ...]]:
    return {"workspace": run.workspace, "output": run.outputs} if isinstance(run, Run) else {}


def _checked(result: Result, problem: DecodeProblem) -> Result:
    """The answer, if it has the shape of one."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"the adapter's call returned {type(result).__name__}; return (out, lse), lse may be None")
    shapes = {"out": tuple(problem.q.shape), "lse": tuple(problem.q.shape[:3])}
    for (name, shape), value in zip(shapes.items(), result, strict=True):
        if name == "lse" and value is None:
            continue
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"the adapter's {name} is {found}; return a floating tensor of shape {shape}")
    return result


def _copy(result: Result) -> Result:
    out, lse = result
    return out.clone(), lse.clone() if lse is not None else None
