"""`bench decode-report`: rows of `bench decode` as Markdown tables: by model, format, page and query length; the mask; each peer; the targets."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from atoll.bench.published import Published
from atoll.bench.report import SLOWER_LIMIT, Comparison
from atoll.bench.results import CaseResult, Results
from atoll.bench.targets import Verdict, mask_beyond_noise


def report_lines(results: Results, verdicts: Sequence[Verdict], published: Published | None = None) -> list[str]:
    lines = [f"# Decode attention: {len({case.shape for case in results.cases})} shapes", "", *_header(results)]
    if published is not None:
        lines.append(f"- published figures, not of this run: {published.measured_on}")
    sections = {
        "By model, KV format, page size and query length": _group_table(results),
        "Masked against unmasked": [*table(_MASK_HEAD, _mask_rows(results)), *_elsewhere(published)],
        "Against others, whose time over ours": table(_OTHERS_HEAD, _other_rows(results, published)),
        "Targets": table(("target", "limit", "measured", ""), [(v.target, v.limit, v.measured, v.word) for v in verdicts]),
        "Not measured": [f"- {count} x {text}" for text, count in _notes(results).items()],
    }
    for title, body in sections.items():
        if body:
            lines += ["", f"## {title}", "", *body]
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are aligned, so that it reads well as plain text too; nothing without rows."""
    cells = [tuple(head), *map(tuple, rows)]
    if len(cells) == 1:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _header(results: Results) -> list[str]:
    lines = []
    for env in dict.fromkeys(case.environment for case in results.cases):
        here = [case for case in results.cases if case.environment == env]
        runs = ", ".join(dict.fromkeys(row.run or "(no name)" for case in here for row in case.rows))
        roof = here[0].roof_gbps
        # One for all commands on a GPU: what any kernel reached there, the others could have.
        floor = f"roof {roof / 1e3:.2f} TB/s, the best rate of all rows on this GPU" if roof is not None else "no roof, so no floor"
        gpu = f"{env.device} {env.device_id or ''}".strip()
        lines.append(f"- {gpu}, commit {env.commit}, torch {env.torch}, triton {env.triton}, runs {runs}: {len(here)} cases; {floor}")
    orders = dict.fromkeys(row.page_order for case in results.cases for row in case.rows)
    return [*lines, f"- pages {' and '.join(orders)}; warm and cold L2 are told apart"]


_GROUP_HEAD = ("L2", "model", "KV", "page", "QL", "n", "masked/unmasked", "worst", "time/floor", "worst", "error")


def _group_table(results: Results) -> list[str]:
    """With two columns for each other kernel of the run: its time over ours, geomean and least."""
    others = list(dict.fromkeys(name for case in results.cases for name, row in case.others.items() if row.time_us is not None))
    head = (*_GROUP_HEAD, *(column for name in others for column in (f"{name}/ours", "least")))
    return table(head, [(*cells, *(cell for name in others for cell in _other_cells(cases, name))) for cells, cases in _groups(results)])


def _groups(results: Results) -> Iterator[tuple[tuple[str, ...], list[CaseResult]]]:
    groups: dict[tuple[str, ...], list[CaseResult]] = defaultdict(list)
    for case in sorted(results.cases, key=lambda case: (results.l2_states.index(case.l2), case.shape.heads.name, case.shape.kv_format, case.shape.page_size)):
        shape = case.shape
        groups[case.l2 or "", shape.heads.name, shape.kv_format, str(shape.page_size), str(shape.query_len)].append(case)
        groups[case.l2 or "", "all", "", "", ""].append(case)
    # The sum of an L2 state stands behind its groups.
    ordered = sorted(groups.items(), key=lambda item: (results.l2_states.index(item[0][0] or None), item[0][1] == "all"))
    for key, cases in ordered:
        yield (*key, str(len(cases)), *_ratio_cells(cases), _error(cases)), cases


def _other_cells(cases: Sequence[CaseResult], name: str) -> tuple[str, str]:
    ratios = {case.label: ratio for case in cases if (ratio := _over_ours(case, name)) is not None}
    return (f"{Comparison(ratios).geomean:.3f}", f"{min(ratios.values()):.3f}") if ratios else ("", "")


def _over_ours(case: CaseResult, name: str) -> float | None:
    ours, theirs = case.masked, case.others.get(name)
    if ours is None or ours.time_us is None or theirs is None or theirs.time_us is None:
        return None
    return theirs.time_us / ours.time_us


def _ratio_cells(cases: Sequence[CaseResult]) -> tuple[str, ...]:
    mask, floor = _mask(cases), Comparison({case.label: case.over_floor for case in cases if case.over_floor is not None})
    percent = (f"{mask.geomean - 1:+.2%}", f"{mask.worst[1] - 1:+.1%}") if mask.ratios else ("", "")
    return (*percent, *((f"{floor.geomean:.2f}", f"{floor.worst[1]:.2f}") if floor.ratios else ("", "")))


def _mask(cases: Iterable[CaseResult]) -> Comparison:
    return Comparison({case.label: case.mask_ratio for case in cases if case.mask_ratio is not None})


def _error(cases: Iterable[CaseResult]) -> str:
    errors = [case.masked.rel_error for case in cases if case.masked is not None and case.masked.rel_error is not None]
    return f"{max(errors):.2%}" if errors else ""


_MASK_HEAD = ("L2", "n", "geomean", "worst", "of", f"above {SLOWER_LIMIT:+.0%}", "of these beyond the case's noise", "noise geomean", "noise worst")


def _mask_rows(results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for l2 in results.l2_states:
        cases = results.of(l2)
        mask, noise = _mask(cases), Comparison({case.label: case.noise_ratio for case in cases if case.noise_ratio is not None})
        if not mask.ratios:
            continue
        case, worst = mask.worst
        noisy = max((ratio - 1 for ratio in noise.ratios.values()), key=abs, default=None)
        rows.append(
            (
                *(l2 or "", str(len(mask.ratios)), f"{mask.geomean - 1:+.2%}", f"{worst - 1:+.1%}", case, str(mask.num_above())),
                str(sum(map(mask_beyond_noise, cases))) if noise.ratios else "not measured",
                *((f"{noise.geomean - 1:+.2%}", f"{noisy:+.1%}") if noisy is not None else ("", "")),
            )
        )
    return rows


def _elsewhere(published: Published | None) -> list[str]:
    return ["", f"Published: {published.mask}."] if published is not None and published.mask is not None else []


_OtherKey = tuple[str, str, str, str]
_OTHERS_HEAD = ("L2", "KV", "kernel", "figures", "n", "geomean", "least", "of", "ours ahead", "its error")


def _other_rows(results: Results, published: Published | None) -> list[tuple[str, ...]]:
    """A kernel that was timed in the run and is published too has two rows, which tell how far apart the two are."""
    ratios: dict[_OtherKey, dict[str, float]] = defaultdict(dict)
    errors: dict[_OtherKey, float] = {}
    for case in results.cases:
        if case.masked is None or case.masked.time_us is None:
            continue
        for name, row in case.others.items():
            key: _OtherKey = (case.l2 or "", case.shape.kv_format, name, "this run")
            if (ratio := _over_ours(case, name)) is not None:
                ratios[key][case.shape.name] = ratio
                errors[key] = max(errors.get(key, 0.0), row.rel_error or 0.0)
        for peer in published.peers if published is not None and case.l2 == "warm" else ():
            key = (case.l2 or "", case.shape.kv_format, peer.name, "published")
            if case.shape.name in peer.time_us:
                ratios[key][case.shape.name] = peer.time_us[case.shape.name] / case.masked.time_us
                errors[key] = peer.rel_error.get(case.shape.kv_format, 0.0)
    rows: list[tuple[str, ...]] = []
    for key, found in sorted(ratios.items(), key=lambda item: (results.l2_states.index(item[0][0] or None), *item[0][1:])):
        where, least = min(found.items(), key=lambda item: item[1])
        ahead = sum(ratio > 1 for ratio in found.values()) / len(found)
        error = f"{errors[key]:.2%}" if errors[key] else ""
        rows.append((*key, str(len(found)), f"{Comparison(found).geomean:.3f}", f"{least:.3f}", where, f"{ahead:.1%}", error))
    return rows


def _notes(results: Results) -> dict[str, int]:
    """Why times are missing, and how often."""
    counts: dict[str, int] = defaultdict(int)
    for row in (row for case in results.cases for row in case.rows if row.time_us is None):
        counts[f"{row.backend}: {row.note}"] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
