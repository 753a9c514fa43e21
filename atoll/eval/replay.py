"""`eval replay`: each segment of questions asked twice, the second time read back from the prefix cache that the first one filled; tokens compared."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.eval.compare import Divergence, differs, divergence
from atoll.eval.gsm8k import Gsm8kOptions, ask_pass
from atoll.eval.rows import Row
from atoll.eval.target import Target


@dataclass(frozen=True)
class Segment:
    """Some neighbouring questions, asked twice."""

    first: int  # question
    questions: int
    prompt_tokens: int | None  # of one pass; None: the server did not tell
    cached_tokens: tuple[int | None, int | None]  # of the prompts, read from the cache in the filling pass and in the one that reads back
    divergences: list[Divergence]


@dataclass(frozen=True)
class ReplayReport:
    """All segments."""

    segments: list[Segment]
    rows: list[Row]  # pass 0 fills, pass 1 reads back

    @property
    def divergences(self) -> list[Divergence]:
        return [found for segment in self.segments for found in segment.divergences]

    @property
    def cached_tokens(self) -> int | None:
        """Read back in pass 1; None: not told."""
        return _sum([segment.cached_tokens[1] for segment in self.segments])

    @property
    def prompt_tokens(self) -> int | None:
        return _sum([segment.prompt_tokens for segment in self.segments])


def run_replay(
    target: Target,
    options: Gsm8kOptions,
    segment_size: int,
    on_row: Callable[[Row], None] = lambda row: None,
    on_segment: Callable[[Segment], None] = lambda segment: None,
) -> ReplayReport:
    """Both passes of a segment before the next segment, so that a cache smaller than all prompts still holds those of one.

    The prefix cache is emptied once, before the first pass: later segments meet a pool in use, and evict what earlier ones left.
    Raises ConfigError for a segment size below 1, or where the second pass read nothing from the cache: then the replay has shown nothing.
    """
    if segment_size < 1:
        raise ConfigError(f"segment {segment_size} is below 1; give the number of questions that are filled and read back together")
    target.forget()
    segments: list[Segment] = []
    rows: list[Row] = []
    for first in range(0, len(options.questions), segment_size):
        indices = range(first, min(first + segment_size, len(options.questions)))
        passes: list[list[Row]] = []
        for i_pass in range(2):
            found = []
            for row in ask_pass(target, options, indices, i_pass):
                found.append(row)
                on_row(row)
            passes.append(sorted(found, key=lambda row: row.index))
        segment = _segment(first, *passes)
        segments.append(segment)
        rows += passes[0] + passes[1]
        on_segment(segment)
    report = ReplayReport(segments, rows)
    if report.cached_tokens == 0:
        raise ConfigError(
            f"the second pass read 0 of {report.prompt_tokens} prompt tokens from the cache, so nothing was replayed; switch prefix caching on, "
            "give the pool more pages, or use a smaller segment"
        )
    return report


def _segment(first: int, filling: list[Row], reading: list[Row]) -> Segment:
    return Segment(
        first=first,
        questions=len(filling),
        prompt_tokens=_sum([row.num_prompt_tokens for row in filling]),
        cached_tokens=(_sum([row.num_cached_tokens for row in filling]), _sum([row.num_cached_tokens for row in reading])),
        divergences=[divergence(a, b) for a, b in zip(filling, reading, strict=True) if differs(a, b)],
    )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def segment_line(segment: Segment) -> str:
    last = segment.first + segment.questions - 1
    named = f"questions {segment.first} to {last}" if segment.questions > 1 else f"question {last}"
    told = ["not told" if count is None else str(count) for count in (*segment.cached_tokens, segment.prompt_tokens)]
    return f"{named}: {len(segment.divergences)} differ; prompt tokens from the cache: filling {told[0]}, reading back {told[1]}, of {told[2]}"
