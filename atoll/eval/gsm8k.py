"""`eval gsm8k`: word problems asked of an engine or a server, each answer graded as it comes, and what they sum up to."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from atoll.engine.sampling import SamplingParams
from atoll.errors import counted
from atoll.eval.figures import Mean, mean_of
from atoll.eval.prompts import PromptForm
from atoll.eval.questions import Question
from atoll.eval.rows import Row, make_row, question_means
from atoll.eval.target import Target

MAX_REASONS = 3  # shown, of errors


@dataclass(frozen=True)
class Gsm8kOptions:
    """What is asked, and how."""

    questions: Sequence[Question]
    form: PromptForm
    params: SamplingParams  # its seed is the first question's; each later question and pass takes the next
    passes: int = 1


@dataclass(frozen=True)
class Gsm8kReport:
    """A run summed up."""

    questions: int
    passes: int
    strict: Mean
    flexible: Mean
    flexible_by_pass: list[float]
    flexible_by_split: dict[str, Mean]  # where the questions' file names splits
    empty: int  # answers without any text, over all passes as the counts below
    truncated: int  # cut at max_tokens, or at what the model can hold
    garbled: int  # with characters that are garbage after their prompt
    errors: int
    reasons: dict[str, int]  # of these errors, the most frequent first; reasons that differ in numbers alone count as one, said as it first came
    output_tokens: int | None  # None: the server did not tell
    cached_tokens: int | None


def run_gsm8k(target: Target, options: Gsm8kOptions, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Ask all questions, pass after pass; rows in the order in which they are done."""
    rows = []
    num_questions = len(options.questions)
    for i_pass in range(options.passes):
        for row in ask_pass(target, options, range(num_questions), i_pass, seed_offset=i_pass * num_questions):
            rows.append(row)
            on_row(row)
    return rows


def ask_pass(target: Target, options: Gsm8kOptions, indices: Sequence[int], i_pass: int, *, seed_offset: int = 0) -> Iterator[Row]:
    """Ask some of the questions once."""
    prompts = [options.form.prompt(options.questions[index]) for index in indices]
    params = [replace(options.params, seed=(options.params.seed or 0) + seed_offset + index) for index in indices]
    for answer in target.ask(prompts, params):
        i = answer.index
        seed = params[i].seed
        assert seed is not None
        yield make_row(i_pass, indices[i], options.questions[indices[i]], prompts[i], seed, answer)


def sum_up(rows: Sequence[Row]) -> Gsm8kReport:
    """Standard errors are over questions: more passes over the same ones do not make them smaller than the questions' own variety."""
    passes = sorted({row.pass_index for row in rows})
    splits = sorted({row.split for row in rows if row.split is not None})
    output, cached = ([getattr(row, name) for row in rows] for name in ("num_output_tokens", "num_cached_tokens"))
    return Gsm8kReport(
        questions=len({row.index for row in rows}),
        passes=len(passes),
        strict=mean_of(list(question_means(rows, "strict").values())),
        flexible=mean_of(list(question_means(rows, "flexible").values())),
        flexible_by_pass=[mean_of([row.flexible for row in rows if row.pass_index == i_pass]).value for i_pass in passes],
        flexible_by_split={split: mean_of(list(question_means(_of(rows, split), "flexible").values())) for split in splits},
        empty=sum(row.empty for row in rows),
        truncated=sum(row.truncated for row in rows),
        garbled=sum(row.garbled for row in rows),
        errors=sum(row.failed for row in rows),
        reasons=_reasons([row.error or row.finish_reason for row in sorted(rows, key=lambda row: row.key) if row.failed]),
        output_tokens=None if None in output else sum(output),
        cached_tokens=None if None in cached else sum(cached),
    )


def _of(rows: Sequence[Row], split: str) -> list[Row]:
    return [row for row in rows if row.split == split]


def _reasons(errors: Sequence[str]) -> dict[str, int]:
    kinds = [re.sub(r"\d+", "0", error) for error in errors]
    said = dict(reversed([*zip(kinds, errors, strict=True)]))
    return {said[kind]: count for kind, count in Counter(kinds).most_common()}


def error_lines(report: Gsm8kReport) -> list[str]:
    """Empty where nothing failed."""
    if not report.errors:
        return []
    reasons = [*report.reasons.items()]
    lines = [f"{counted(report.errors, 'answer')} ended in an error:", *(f"  {count} x {reason}" for reason, count in reasons[:MAX_REASONS])]
    return [*lines, f"  and {counted(len(reasons) - MAX_REASONS, 'other reason')}"] if len(reasons) > MAX_REASONS else lines


def report_lines(report: Gsm8kReport) -> list[str]:
    asked = counted(report.questions, "question") + (f", {report.passes} passes" if report.passes > 1 else "")
    lines = [f"{name:<17} {_mean(mean)}   ({asked})" for name, mean in (("strict-match", report.strict), ("flexible-extract", report.flexible))]
    if report.passes > 1:
        lines.append("flexible by pass  " + " ".join(f"{value:.4f}" for value in report.flexible_by_pass))
    lines += [f"flexible, {split}: {_mean(mean)}" for split, mean in report.flexible_by_split.items()]
    lines.append(f"empty {report.empty}, truncated {report.truncated}, garbled {report.garbled}, errors {report.errors}")
    told = [f"{name} tokens {count}" for name, count in (("output", report.output_tokens), ("cached prompt", report.cached_tokens)) if count is not None]
    return [*lines, ", ".join(told)] if told else lines


def _mean(mean: Mean) -> str:
    return f"{mean.value:.4f}" + (f" ± {mean.stderr:.4f}" if mean.stderr is not None else "")
