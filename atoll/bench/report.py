"""Decode results as text: one line per case, and the summary that compares variants. Knows no device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.bench.rows import DecodeRow

SLOWER_LIMIT = 0.03  # masked against unmasked; above it a case counts as slower


@dataclass(frozen=True)
class Comparison:
    """Ratios of one variant's times to another's over the cases that have both."""

    ratios: dict[str, float]  # case (with its L2 state) -> time / base time

    @property
    def geomean(self) -> float:
        return math.exp(sum(math.log(r) for r in self.ratios.values()) / len(self.ratios))

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.ratios.items(), key=lambda item: item[1])

    def num_above(self, limit: float = SLOWER_LIMIT) -> int:
        return sum(ratio > 1 + limit for ratio in self.ratios.values())


def compare(rows: Iterable[DecodeRow], of: tuple[object, ...], base: tuple[object, ...]) -> Comparison:
    """Compare variants named by `variant_key`."""
    times: dict[str, dict[tuple[object, ...], float]] = {}
    for row in rows:
        if row.time_us is not None:
            times.setdefault(f"{row.case} {row.l2 or ''}".strip(), {})[variant_key(row)] = row.time_us
    return Comparison({case: found[of] / found[base] for case, found in times.items() if of in found and base in found})


def variant_key(row: DecodeRow) -> tuple[object, ...]:
    return row.backend, row.mask_unowned_kv, row.repeat


def case_lines(rows: Sequence[DecodeRow], roof_gbps: float | None) -> list[str]:
    """One line per L2 state: the masked variant's time and rate, then every other variant against it."""
    lines = []
    for l2 in dict.fromkeys(row.l2 for row in rows):
        here = [row for row in rows if row.l2 == l2]
        parts = [f"{here[0].case:<36} {l2 or '':<4}", _measured(here[0], roof_gbps), *(_against(row, here[0]) for row in here[1:])]
        lines.append(" | ".join(parts))
    return lines


def summary_lines(rows: Sequence[DecodeRow], read_gbps: float | None, roof_gbps: float | None) -> list[str]:
    """Geomean, worst and count of slower cases of every variant against the masked one, and the roof."""
    lines = []
    if roof_gbps is not None and read_gbps is not None:
        lines.append(f"roof {roof_gbps / 1e3:.2f} TB/s (a plain reduction read {read_gbps / 1e3:.2f} TB/s)")
    masked = next((variant_key(row) for row in rows if row.mask_unowned_kv), None)
    if masked is None:
        return lines
    backend = masked[0]
    lines += _compared(rows, "masked against unmasked", masked, (backend, False, 0))
    lines += _compared(rows, "masked again against masked (noise)", (backend, True, 1), masked)
    for name, flag in dict.fromkeys((row.backend, row.mask_unowned_kv) for row in rows if row.backend != backend or row.mask_unowned_kv is None):
        lines += _compared(rows, f"masked against {name}", masked, (name, flag, 0))
    return lines


def _compared(rows: Sequence[DecodeRow], title: str, of: tuple[object, ...], base: tuple[object, ...]) -> list[str]:
    found = compare(rows, of, base)
    if not found.ratios:
        return []
    case, worst = found.worst
    return [f"{title}: geomean {found.geomean - 1:+.2%}, worst {worst - 1:+.1%} ({case}), {found.num_above()} of {len(found.ratios)} above {SLOWER_LIMIT:+.0%}"]


def _measured(row: DecodeRow, roof_gbps: float | None) -> str:
    if row.time_us is None or row.gbps is None:
        return f"not measured: {row.note}"
    text = f"{row.time_us:9.2f} us {row.gbps / 1e3:5.2f} TB/s"
    if roof_gbps is not None:
        text += f" {row.gbps / roof_gbps:4.0%}"
    if row.spread is not None:
        text += f" ±{row.spread / 2:4.1%}"
    if row.rel_error is not None:
        text += f" err {row.rel_error:.2%}"
    return f"{text} {row.config or ''}".rstrip()


def _against(row: DecodeRow, base: DecodeRow) -> str:
    ours, base_us = row.backend == base.backend and row.mask_unowned_kv is not None, base.time_us
    name = ("again" if row.repeat else "unmasked") if ours else row.backend
    if row.time_us is None:
        return f"{name} not measured: {row.note}"
    change = f" ({row.time_us / base_us - 1:+.1%})" if base_us is not None else ""
    return f"{name} {row.time_us:.2f} us{change}"
