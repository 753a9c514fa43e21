"""`eval replay`: each segment of questions asked twice, the second time read back from the prefix cache that the first one filled; tokens compared."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.eval.compare import Divergence, differs, divergence
from atoll.eval.figures import mean_of
from atoll.eval.gsm8k import Gsm8kOptions, ask_pass
from atoll.eval.rows import Row, question_means
from atoll.eval.target import Target

FETCHED_SHARE = 0.9  # of what is read back; below it a replay says little about fetching


@dataclass(frozen=True)
class Segment:
    """Some neighbouring questions, asked twice. What a server does not tell is None; pairs are of the filling pass and of the one that reads back."""

    first: int  # question
    questions: int
    prompt_tokens: int | None  # of one pass
    cached_tokens: tuple[int | None, int | None]  # of the prompts, read from the cache
    fetched_tokens: tuple[int | None, int | None]  # of these, brought back from a tier
    divergences: list[Divergence]
    control: list[Divergence] | None = None  # of a third pass, without the order of clears and loads; None: there was none


@dataclass(frozen=True)
class ReplayReport:
    """All segments."""

    segments: list[Segment]
    rows: list[Row]  # pass 0 fills, pass 1 reads back
    control_rows: list[Row]  # pass 2

    @property
    def divergences(self) -> list[Divergence]:
        return [found for segment in self.segments for found in segment.divergences]

    @property
    def control(self) -> list[Divergence]:
        return [found for segment in self.segments for found in segment.control or ()]

    @property
    def cached_tokens(self) -> int | None:
        """Read back in pass 1; None: not told."""
        return _sum([segment.cached_tokens[1] for segment in self.segments])

    @property
    def fetched_tokens(self) -> int | None:
        """Of these, brought back from a tier."""
        return _sum([segment.fetched_tokens[1] for segment in self.segments])

    @property
    def prompt_tokens(self) -> int | None:
        return _sum([segment.prompt_tokens for segment in self.segments])

    @property
    def fetched_share(self) -> float | None:
        """Of what pass 1 reused."""
        return share(self.fetched_tokens, self.cached_tokens)


def run_replay(
    target: Target,
    options: Gsm8kOptions,
    segment_size: int,
    on_row: Callable[[Row], None] = lambda row: None,
    on_segment: Callable[[Segment], None] = lambda segment: None,
    *,
    ordering_control: bool = False,
) -> ReplayReport:
    """Both passes of a segment before the next segment, so that a cache smaller than all prompts still holds those of one.

    The prefix cache is emptied once, before the first pass: later segments meet a pool in use, and evict what earlier ones left. The control
    reads each segment back once more with the order of clears and loads taken out; since that leaves wrong rows, the cache is then emptied after each segment.
    Raises ConfigError for a segment size below 1, or where the second pass read nothing from the cache: then the replay has shown nothing.
    """
    if segment_size < 1:
        raise ConfigError(f"segment {segment_size} is below 1; give the number of questions that are filled and read back together")
    target.forget()
    segments: list[Segment] = []
    rows: list[Row] = []
    control_rows: list[Row] = []

    def ask(indices: range, i_pass: int) -> list[Row]:
        found = []
        for row in ask_pass(target, options, indices, i_pass):
            found.append(row)
            on_row(row)
        return sorted(found, key=lambda row: row.index)

    for first in range(0, len(options.questions), segment_size):
        indices = range(first, min(first + segment_size, len(options.questions)))
        passes = [ask(indices, i_pass) for i_pass in range(2)]
        control: list[Row] | None = None
        if ordering_control:
            with target.out_of_order():
                control = ask(indices, 2)
            target.forget()
        segment = _segment(first, passes[0], passes[1], control)
        segments.append(segment)
        rows += passes[0] + passes[1]
        control_rows += control or []
        on_segment(segment)
    report = ReplayReport(segments, rows, control_rows)
    if report.cached_tokens == 0:
        raise ConfigError(
            f"the second pass read 0 of {report.prompt_tokens} prompt tokens from the cache, so nothing was replayed; switch prefix caching on, "
            "give the pool more pages, or use a smaller segment"
        )
    return report


def _segment(first: int, filling: list[Row], reading: list[Row], control: list[Row] | None) -> Segment:
    return Segment(
        first=first,
        questions=len(filling),
        prompt_tokens=_sum([row.num_prompt_tokens for row in filling]),
        cached_tokens=(_sum([row.num_cached_tokens for row in filling]), _sum([row.num_cached_tokens for row in reading])),
        fetched_tokens=(_sum([row.num_fetched_tokens for row in filling]), _sum([row.num_fetched_tokens for row in reading])),
        divergences=_divergences(filling, reading),
        control=_divergences(filling, control) if control is not None else None,
    )


def _divergences(a: list[Row], b: list[Row]) -> list[Divergence]:
    return [divergence(x, y) for x, y in zip(a, b, strict=True) if differs(x, y)]


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def share(part: int | None, whole: int | None) -> float | None:
    """None where one of them is not told, or the whole is nothing."""
    return part / whole if part is not None and whole else None


def segment_line(segment: Segment) -> str:
    last = segment.first + segment.questions - 1
    named = f"questions {segment.first} to {last}" if segment.questions > 1 else f"question {last}"
    told = ["not told" if count is None else str(count) for count in (*segment.cached_tokens, segment.prompt_tokens)]
    line = f"{named}: {len(segment.divergences)} differ; prompt tokens from the cache: filling {told[0]}, reading back {told[1]}, of {told[2]}"
    if segment.fetched_tokens[1]:
        line += f"; fetched {_shares(segment.fetched_tokens[1], segment.cached_tokens[1], segment.prompt_tokens)}"
    return line + (f"; out of order {len(segment.control)} differ" if segment.control is not None else "")


def fetched_lines(report: ReplayReport) -> list[str]:
    """How much of what was read back came from a tier, and what to do where that is little."""
    fetched, cached = report.fetched_tokens, report.cached_tokens
    if fetched is None or cached is None:
        return ["fetched: not told"]
    lines = [f"fetched in pass 1: {_shares(fetched, cached, report.prompt_tokens)}"]
    if (found := report.fetched_share) is None or found < FETCHED_SHARE:
        lines.append(
            f"that is below {FETCHED_SHARE:.0%}: the pool itself still held the rest, so this says less about fetching; "
            "give fewer --num-pages, a larger --segment, or prompts that have less in common"
        )
    return lines


def control_lines(report: ReplayReport) -> list[str]:
    """Accuracy of each pass, that of the control last; what the control has shown."""
    rows = [*report.rows, *report.control_rows]
    of_passes = [mean_of(list(question_means([row for row in rows if row.pass_index == i], "flexible").values())).value for i in range(3)]
    asked = len(report.control_rows)
    lines = [f"flexible-extract: filling {of_passes[0]:.4f}, reading back {of_passes[1]:.4f}, out of order {of_passes[2]:.4f}"]
    if report.control:
        return [*lines, f"control, clears after loads: {len(report.control)} of {asked} answers differ, as they must"]
    return [
        *lines,
        f"control, clears after loads: 0 of {asked} answers differ, so this replay cannot find that fault; give fewer --num-pages",
    ]


def _shares(fetched: int, cached: int | None, prompt: int | None) -> str:
    said = [str(fetched)]
    for whole, what in ((cached, "reused"), (prompt, "prompt tokens")):
        if (found := share(fetched, whole)) is not None:
            said.append(f"{found:.1%} of the {whole} {what}")
    return ", ".join(said)
