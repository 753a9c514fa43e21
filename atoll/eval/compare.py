"""`eval compare`: two runs over the same questions, answer by answer and, where both were greedy, token by token."""

from dataclasses import dataclass
from typing import Literal

from atoll.errors import ConfigError, counted
from atoll.eval.figures import PairedDifference, paired_difference
from atoll.eval.rows import Row, Run, question_means

By = Literal["auto", "output", "score"]
# Runs whose scores differ by chance less often than this count as different.
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Divergence:
    """An answer that the two runs gave differently."""

    pass_index: int
    index: int
    token: int | None  # the first that differs; None where a run does not tell its tokens
    character: int  # the first that differs
    correct_a: bool
    correct_b: bool


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    questions: int
    missing: int  # answers that only one of the runs has
    strict: PairedDifference
    flexible: PairedDifference
    by: Literal["output", "score"]  # what decides whether the runs are the same
    answers: int  # compared, over all passes
    divergences: list[Divergence]

    @property
    def same(self) -> bool:
        if self.by == "output":
            return not self.divergences and not self.missing
        return min(self.strict.p, self.flexible.p) >= SIGNIFICANCE


def compare_runs(a: Run, b: Run, by: By = "auto") -> Comparison:
    """By output: every answer the same. By score: neither score differs at the level of SIGNIFICANCE. Auto: by output where both were greedy.

    A question that was asked several times counts once, with the mean of its scores. Raises ConfigError for runs that asked other things.
    """
    common = sorted(a.rows.keys() & b.rows.keys())
    if not common:
        raise ConfigError(f"{a.path} and {b.path} have 0 questions in common; compare runs over the same data")
    pairs = [(a.rows[key], b.rows[key]) for key in common]
    other = [x.index for x, y in pairs if x.question != y.question]
    if other:
        raise ConfigError(f"{a.path} and {b.path} differ in {counted(len(other), 'question')}, the first is {other[0]}; compare runs over the same data")
    chosen: Literal["output", "score"] = ("output" if a.greedy and b.greedy else "score") if by == "auto" else by
    return Comparison(
        questions=len({x.index for x, _ in pairs}),
        missing=len(a.rows.keys() ^ b.rows.keys()),
        strict=_scores(pairs, "strict"),
        flexible=_scores(pairs, "flexible"),
        by=chosen,
        answers=len(pairs),
        divergences=[divergence(x, y) for x, y in pairs if differs(x, y)],
    )


def differs(a: Row, b: Row) -> bool:
    """In tokens where both are known, else in text; or one broke off."""
    same_tokens = a.token_ids == b.token_ids if a.token_ids is not None and b.token_ids is not None else a.text == b.text
    return not same_tokens or a.failed != b.failed


def divergence(a: Row, b: Row) -> Divergence:
    token = first_difference(a.token_ids, b.token_ids) if a.token_ids is not None and b.token_ids is not None else None
    return Divergence(a.pass_index, a.index, token, first_difference(a.text, b.text), a.flexible, b.flexible)


def first_difference(a: list[int] | str, b: list[int] | str) -> int:
    """The first place in which two sequences differ; where one begins the other, the shorter one's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _scores(pairs: list[tuple[Row, Row]], score: str) -> PairedDifference:
    a, b = question_means([x for x, _ in pairs], score), question_means([y for _, y in pairs], score)
    return paired_difference(list(a.values()), list(b.values()))


def comparison_lines(found: Comparison, names: tuple[str, str], shown: int = 10) -> list[str]:
    common = f"{counted(found.questions, 'question')}, {counted(found.answers, 'answer')} in common, {found.missing} in one run only"
    lines = [f"A {names[0]}", f"B {names[1]}", common]
    for name, scores in (("strict-match", found.strict), ("flexible-extract", found.flexible)):
        lines.append(
            f"{name:<17} only in A {scores.only_a}, only in B {scores.only_b}, McNemar's exact p {scores.p:.3g}; "
            f"B - A {scores.difference:+.4f}, 95 % interval {scores.low:+.4f} to {scores.high:+.4f}"
        )
    lines.append(f"{len(found.divergences)} of {found.answers} answers differ")
    for one in found.divergences[:shown]:
        place = f"token {one.token}" if one.token is not None else f"character {one.character}"
        marks = ["right" if correct else "wrong" for correct in (one.correct_a, one.correct_b)]
        lines.append(f"  pass {one.pass_index} question {one.index}: from {place} on; A {marks[0]}, B {marks[1]}")
    if len(found.divergences) > shown:
        lines.append(f"  ... and {len(found.divergences) - shown} more; --json shows all")
    if found.missing and found.by == "output":
        return [*lines, f"different: {counted(found.missing, 'answer')} in one run only; run both with the same --limit, --passes and data"]
    return [*lines, f"{'the same' if found.same else 'different'}, by {found.by}"]
