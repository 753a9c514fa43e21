"""Decode results as a picture: each shape's time over its floor, warm and cold L2 side by side, as an SVG that the same rows give byte for byte."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from atoll.bench.results import CaseResult, Results
from atoll.errors import ConfigError

# Told apart in grey and by the colour-blind too (Okabe and Ito).
COLOURS = {"bf16": "#0072B2", "fp8_tensor": "#D55E00", "fp8_token": "#009E73"}
MARKERS = {16: "o", 64: "s", 128: "^"}
SPREAD = 1.07
# No date, and ids that do not change from run to run.
_SVG: Any = {"svg.hashsalt": "atoll", "svg.fonttype": "path", "font.size": 9}


def plot_over_floor(results: Results, path: Path) -> None:
    """Write the picture. Raises ConfigError without matplotlib, or where no case has a floor."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"the plot needs matplotlib, which cannot be imported: {error}; install atoll[plot]") from error
    panels = {l2: [case for case in results.of(l2) if case.over_floor is not None] for l2 in results.l2_states}
    panels = {l2: cases for l2, cases in panels.items() if cases}
    if not panels:
        raise ConfigError("no row has a roof, so there is no floor to plot; measure on a GPU")
    with matplotlib.rc_context(_SVG):
        figure = Figure(figsize=(1.2 + 5.2 * len(panels), 5.2), layout="constrained")
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axis, (l2, cases) in zip(axes, panels.items(), strict=True):
            _draw(axis, cases)
            axis.set_title(f"{l2 or 'unknown'} L2, {len(cases)} shapes")
        axes[0].set_ylabel("time / floor")
        _set_ticks(axes[0], panels.values())
        handles, labels = _legend(list(panels.values()))
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, handletextpad=0.2, columnspacing=1.2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(axis: Any, cases: Sequence[CaseResult]) -> None:
    for i_format, (kv_format, colour) in enumerate(COLOURS.items()):
        for i_page, (page_size, marker) in enumerate(MARKERS.items()):
            # Shapes of one size have nearly one floor: moved aside by format and page, they do not hide each other.
            aside = SPREAD ** (3 * (i_format - 1) + i_page - 1)
            for query_len in sorted({case.shape.query_len for case in cases}):
                here = [c for c in cases if (c.shape.kv_format, c.shape.page_size, c.shape.query_len) == (kv_format, page_size, query_len)]
                filled = colour if query_len == 1 else "none"
                points = {"facecolors": filled, "edgecolors": colour, "marker": marker, "s": 11, "linewidths": 0.8, "alpha": 0.8}
                axis.scatter([aside * (c.floor_us or 0) for c in here], [c.over_floor for c in here], **points)
    axis.set(xscale="log", yscale="log", xlabel="floor: bytes / roof, us; points are moved aside by format and page")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3, linewidth=0.5)


def _set_ticks(axis: Any, panels: Iterable[Sequence[CaseResult]]) -> None:
    shares = [case.over_floor or 1.0 for cases in panels for case in cases]
    low, high = min(0.95, 0.95 * min(shares)), 1.2 * max(shares)
    axis.set_ylim(low, high)
    ticks = [tick for tick in (0.2, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100) if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)


def _legend(panels: Sequence[Sequence[CaseResult]]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    shapes = [case.shape for cases in panels for case in cases]

    def dot(marker: str, colour: str, *, filled: bool = True) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, markersize=5, color=colour, markerfacecolor=colour if filled else "none")

    entries = {kv_format: dot("o", colour) for kv_format, colour in COLOURS.items() if any(s.kv_format == kv_format for s in shapes)}
    entries |= {f"page {size}": dot(marker, "grey") for size, marker in MARKERS.items() if any(s.page_size == size for s in shapes)}
    if any(s.query_len > 1 for s in shapes):
        entries["several query tokens"] = dot("o", "grey", filled=False)
    return list(entries.values()), list(entries)
