"""Rows of `bench decode`, of one or several commands, as the cases of one run: who was timed, against what floor. Knows no device and no target."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from atoll.bench.rows import DecodeRow, Environment, read_decode_rows
from atoll.bench.shapes import DecodeShape, full_shapes
from atoll.errors import ConfigError
from atoll.ops.attention import BACKENDS

_SHAPES = {shape.name: shape for shape in full_shapes()}


@dataclass
class CaseResult:
    """All rows of one case in one L2 state, from one command."""

    shape: DecodeShape
    l2: str | None
    environment: Environment
    rows: list[DecodeRow] = field(default_factory=list)
    roof_gbps: float | None = None  # of its GPU, over all rows

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.l2 or ''}".strip()

    @cached_property
    def masked(self) -> DecodeRow | None:
        """The kernel that the case is about: the first that was asked for, whether it was timed or failed its gate."""
        return next((row for row in self.rows if row.mask_unowned_kv and not row.repeat), None)

    @property
    def mask_ratio(self) -> float | None:
        """Masked against unmasked."""
        return self._against(mask=False, repeat=0)

    @property
    def noise_ratio(self) -> float | None:
        """The masked kernel's second time against its first."""
        ratio = self._against(mask=True, repeat=1)
        return None if ratio is None else 1 / ratio

    @property
    def floor_us(self) -> float | None:
        """The time that the bytes take at the roof."""
        return self.rows[0].bytes / self.roof_gbps / 1e3 if self.roof_gbps else None

    @property
    def over_floor(self) -> float | None:
        if self.masked is None or self.masked.time_us is None or self.floor_us is None:
            return None
        return self.masked.time_us / self.floor_us

    @property
    def others(self) -> dict[str, DecodeRow]:
        """Every other kernel of the case by its name, whether it was timed or not."""
        ours = self.masked.backend if self.masked is not None else self.rows[0].backend
        return {row.backend: row for row in self.rows if not row.repeat and (row.mask_unowned_kv is None or (row.mask_unowned_kv and row.backend != ours))}

    @property
    def peers(self) -> dict[str, DecodeRow]:
        """Those of them that are somebody else's."""
        return {name: row for name, row in self.others.items() if is_peer(name)}

    def _against(self, *, mask: bool, repeat: int) -> float | None:
        if self.masked is None or self.masked.time_us is None:
            return None
        base = (self.masked.backend, mask, repeat)
        for row in self.rows:
            if (row.backend, row.mask_unowned_kv, row.repeat) == base and row.time_us is not None:
                return self.masked.time_us / row.time_us
        return None


@dataclass(frozen=True)
class Results:
    """The cases, in the order in which they were measured."""

    cases: list[CaseResult]

    def of(self, l2: str | None) -> list[CaseResult]:
        return [case for case in self.cases if case.l2 == l2]

    @property
    def l2_states(self) -> list[str | None]:
        return list(dict.fromkeys(case.l2 for case in self.cases))


def is_peer(backend: str) -> bool:
    """Whether somebody else made the kernel; ours are the masking backends, the leaky control, and what is named by its place in Atoll, as the sketch."""
    return backend not in BACKENDS and backend not in ("leaky", "leaky_control") and not backend.startswith("atoll.")


def read_results(paths: Iterable[Path], *, run: str | None = None, commit: str | None = None, mixed: bool = False) -> Results:
    """Rows of the files, of one run or commit where that is given.

    Raises ConfigError where they are of several GPUs, commits, versions or page orders, or have a case twice. With `mixed` these are laid side by side: of a
    case the rows that come last count, all of one command, and each case has the roof of its own GPU.
    """
    read = [one for path in paths for one in read_decode_rows(path)]
    chosen = [(row, env) for row, env in read if run in (None, row.run) and commit in (None, env.commit)]
    if not chosen:
        raise ConfigError(f"none of {len(read)} rows is of run {run or '(any)'} and commit {commit or '(any)'}; name a run or commit that the files have")
    if not mixed:
        _check_one(chosen)
    return make_results(chosen, mixed=mixed)


def make_results(rows: Sequence[tuple[DecodeRow, Environment]], *, mixed: bool = False) -> Results:
    roofs = _roofs(rows)
    cases: dict[tuple[str, str | None], CaseResult] = {}
    for row, env in rows:
        if row.case not in _SHAPES:
            raise ConfigError(f"case {row.case!r} is none of the {len(_SHAPES)} shapes; take it out")
        key, variant = (row.case, row.l2), (row.backend, row.mask_unowned_kv, row.repeat)
        case = cases.get(key)
        again = case is not None and variant in {(r.backend, r.mask_unowned_kv, r.repeat) for r in case.rows}
        if again and not mixed:
            raise ConfigError(
                f"case {row.case} ({row.l2} L2, {row.backend}) is there twice; choose one with --run or --commit, or let the last count with --mixed"
            )
        if case is None or again or (case.environment, case.rows[0].run) != (env, row.run):
            case = cases[key] = CaseResult(_SHAPES[row.case], row.l2, env, roof_gbps=roofs.get(_gpu(env)))
        case.rows.append(row)
    return Results(list(cases.values()))


def _gpu(env: Environment) -> tuple[str, str | None]:
    return env.device, env.device_id


def _roofs(rows: Sequence[tuple[DecodeRow, Environment]]) -> dict[tuple[str, str | None], float]:
    """By GPU: one roof over all commands that ran on it, the best rate that a row reached or noted."""
    roofs: dict[tuple[str, str | None], float] = {}
    for row, env in rows:
        if row.roof_gbps is not None:
            roofs[_gpu(env)] = max(row.roof_gbps, roofs.get(_gpu(env), 0.0))
    return roofs


def _check_one(rows: Sequence[tuple[DecodeRow, Environment]]) -> None:
    kinds = {
        "GPUs": [f"{env.device} {env.device_id or ''}".strip() for _, env in rows],
        "commits": [str(env.commit) for _, env in rows],
        "versions": [f"torch {env.torch} with triton {env.triton}" for _, env in rows],
        "page orders": [row.page_order for row, _ in rows],
    }
    for kind, values in kinds.items():
        found = list(dict.fromkeys(values))
        if len(found) > 1:
            raise ConfigError(f"rows are of {len(found)} {kind} ({', '.join(found)}); choose with --run or --commit, or lay them side by side with --mixed")
