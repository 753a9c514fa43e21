"""Figures of runs against values worked out by hand, and runs compared: the same, altered, not over the same questions."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.eval.compare import compare_runs, comparison_lines, first_difference
from atoll.eval.figures import mcnemar_p, mean_of, paired_difference
from atoll.eval.gsm8k import Gsm8kOptions, error_lines, report_lines, run_gsm8k, sum_up
from atoll.eval.prompts import Prompt, make_form
from atoll.eval.questions import Question
from atoll.eval.replay import control_lines, fetched_lines, run_replay, segment_line
from atoll.eval.rows import Row, header_line, read_run, row_line
from atoll.eval.target import Answer

QUESTIONS = [Question(f"q{i}?", f"#### {i}") for i in range(20)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=100)


class Parrot:
    """Answers each question with its number; `alter` may spoil an answer. Last one first, so that nothing relies on the order."""

    def __init__(self, cached: int | None = None, fetched: int | None = None, passes: int = 2) -> None:
        self.num_calls = 0
        self.cached = cached
        self.fetched = fetched
        self.passes = passes  # of a segment
        self.forgotten_at: list[int] = []
        self.seeds: list[int | None] = []
        self.spoilt: dict[tuple[int, int], dict[str, Any]] = {}  # by call and index

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Answer]:
        self.seeds += [one.seed for one in params]
        for index in reversed(range(len(prompts))):
            number = str(prompts[index]).rpartition("Question: q")[2].partition("?")[0]
            told = (self.cached, self.fetched) if self.num_calls % self.passes else (0, 0)
            answer = Answer(index, f" #### {number}", "stop", [1, 2, int(number)], 10, 3, *told)
            yield replace(answer, **self.spoilt.get((self.num_calls, index), {}))
        self.num_calls += 1

    def forget(self) -> None:
        self.forgotten_at.append(self.num_calls)

    @contextmanager
    def out_of_order(self) -> Iterator[None]:
        assert self.num_calls % 3 == 2
        yield

    def close(self) -> None:
        """Holds nothing."""

    def describe(self) -> dict[str, Any]:
        return {"kind": "parrot"}


def options(passes: int = 1, params: SamplingParams = GREEDY) -> Gsm8kOptions:
    return Gsm8kOptions(QUESTIONS, make_form([], 0, chat=False), params, passes)


def write_run(path: Path, rows: list[Row], temperature: float = 0.0) -> Path:
    path.write_text(header_line({"sampling": {"temperature": temperature}}) + "".join(row_line(row) for row in rows))
    return path


# Figures


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (6, 0, 2 / 64), (1, 5, 2 * (1 + 6) / 64), (3, 3, 1.0), (2, 8, 2 * (1 + 10 + 45) / 1024), (40, 10, 2.386e-05)],
)
def test_mcnemar(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar_p(only_a, only_b) == pytest.approx(p, rel=1e-3)
    assert mcnemar_p(only_b, only_a) == mcnemar_p(only_a, only_b)


def test_standard_error_is_lm_evals() -> None:
    found = mean_of([1.0] * 8 + [0.0] * 2)
    assert found.value == 0.8
    assert found.stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    assert mean_of([1.0]).stderr is None
    with pytest.raises(statistics.StatisticsError):
        mean_of([])


def test_difference_and_its_interval() -> None:
    # 100 pairs, 10 only in A, 4 only in B: (10 + 1) / 102 and (4 + 1) / 102 by Bonett and Price.
    a, b = [1.0] * 10 + [0.0] * 90, [0.0] * 10 + [1.0] * 4 + [0.0] * 86
    found = paired_difference(a, b)
    p_a, p_b = 11 / 102, 5 / 102
    reach = 1.959964 * math.sqrt((p_a + p_b - (p_a - p_b) ** 2) / 102)
    assert (found.only_a, found.only_b) == (10, 4)
    assert found.difference == pytest.approx(-0.06)
    assert (found.low, found.high) == pytest.approx((p_b - p_a - reach, p_b - p_a + reach), rel=1e-5)
    assert found.p == pytest.approx(2 * sum(math.comb(14, k) for k in range(5)) / 2**14)


def test_an_interval_is_not_empty_where_nothing_differs() -> None:
    found = paired_difference([1.0] * 20, [1.0] * 20)
    assert found.difference == 0.0 and found.low < 0.0 < found.high and found.p == 1.0


# Runs


def test_passes_take_new_seeds_and_count_once_for_each_question() -> None:
    target = Parrot()
    target.spoilt[1, 4] = {"text": "no", "finish_reason": "length"}
    rows = run_gsm8k(target, options(passes=2))
    assert target.seeds == list(range(100, 140))
    assert [row.seed for row in rows if row.key == (1, 4)] == [124]
    report = sum_up(rows)
    assert (report.questions, report.passes, report.truncated, report.empty, report.output_tokens) == (20, 2, 1, 0, 120)
    assert report.strict.value == pytest.approx((19 + 0.5) / 20)
    assert report.strict.stderr == pytest.approx(statistics.stdev([1.0] * 19 + [0.5]) / math.sqrt(20))
    assert report.flexible_by_pass == [1.0, 0.95]
    text = "\n".join(report_lines(report))
    assert "strict-match      0.9750 ± 0.0250   (20 questions, 2 passes)" in text and "truncated 1" in text


def test_reasons_of_errors_are_told_by_kind() -> None:
    target = Parrot()
    for index in range(6):
        target.spoilt[0, index] = {"finish_reason": "error", "error": f"500: NaN after {7 - index} tokens"}
    for index, reason in ((6, "429: full"), (7, "429: full"), (8, "no answer: ReadTimeout"), (9, "400: too long"), (10, "the model left")):
        target.spoilt[0, index] = {"finish_reason": "error", "error": reason}
    report = sum_up(run_gsm8k(target, options()))
    assert report.errors == 11 and sum(report.reasons.values()) == 11
    told = ["11 answers ended in an error:", "  6 x 500: NaN after 7 tokens", "  2 x 429: full", "  1 x no answer: ReadTimeout", "  and 2 other reasons"]
    assert error_lines(report) == told
    assert error_lines(sum_up(run_gsm8k(Parrot(), options()))) == []


def test_each_split_has_its_score() -> None:
    questions = [replace(question, split="even" if i % 2 == 0 else "odd") for i, question in enumerate(QUESTIONS)]
    target = Parrot()
    for index in (1, 3):
        target.spoilt[0, index] = {"text": "no"}
    report = sum_up(run_gsm8k(target, replace(options(), questions=questions)))
    assert {split: mean.value for split, mean in report.flexible_by_split.items()} == {"even": 1.0, "odd": 0.8}
    assert "flexible, odd: 0.8000 ± 0.1333" in report_lines(report)
    assert sum_up(run_gsm8k(Parrot(), options())).flexible_by_split == {}


def test_a_server_that_tells_no_tokens_leaves_them_out() -> None:
    target = Parrot()
    target.spoilt[0, 0] = {"num_output_tokens": None, "num_cached_tokens": None}
    report = sum_up(run_gsm8k(target, options()))
    assert (report.output_tokens, report.cached_tokens) == (None, None)
    assert "tokens" not in "\n".join(report_lines(report))


def test_two_runs_are_the_same(tmp_path: Path) -> None:
    a, b = (read_run(write_run(tmp_path / name, run_gsm8k(Parrot(), options()))) for name in "ab")
    found = compare_runs(a, b)
    assert (found.same, found.by, found.answers, found.divergences) == (True, "output", 20, [])


def test_control_altered_answers_compare_as_different(tmp_path: Path) -> None:
    target = Parrot()
    for index in range(6):
        target.spoilt[0, index] = {"text": " #### 99", "token_ids": [1, 7, 7]}
    target.spoilt[0, 9] = {"token_ids": [1, 2]}  # the same text, and right, but other tokens
    a = read_run(write_run(tmp_path / "a", run_gsm8k(Parrot(), options())))
    b = read_run(write_run(tmp_path / "b", run_gsm8k(target, options())))
    found = compare_runs(a, b)
    assert not found.same
    assert [(one.index, one.token, one.correct_a, one.correct_b) for one in found.divergences] == [(i, 1, True, False) for i in range(6)] + [(9, 2, True, True)]
    assert (found.strict.only_a, found.strict.only_b, found.strict.p, found.strict.difference) == (6, 0, 2 / 64, -0.3)
    assert not compare_runs(a, b, "score").same
    text = "\n".join(comparison_lines(found, ("a", "b"), shown=3))
    assert "only in A 6, only in B 0, McNemar's exact p 0.0312" in text
    assert "pass 0 question 0: from token 1 on; A right, B wrong" in text and "... and 4 more" in text
    assert text.endswith("different, by output")


def test_sampled_runs_are_compared_by_score(tmp_path: Path) -> None:
    target = Parrot()
    for index in range(5):
        target.spoilt[0, index] = {"text": "no", "token_ids": [9]}
    a = read_run(write_run(tmp_path / "a", run_gsm8k(Parrot(), options()), temperature=0.7))
    b = read_run(write_run(tmp_path / "b", run_gsm8k(target, options()), temperature=0.7))
    found = compare_runs(a, b)
    assert (found.by, found.same, found.strict.p) == ("score", True, 2 / 32)
    assert not compare_runs(a, b, "output").same


def test_an_answer_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    rows = run_gsm8k(Parrot(), options())
    a, b = read_run(write_run(tmp_path / "a", rows)), read_run(write_run(tmp_path / "b", rows[1:]))
    found = compare_runs(a, b)
    assert (found.same, found.missing, found.answers) == (False, 1, 19)


def test_without_tokens_text_is_compared(tmp_path: Path) -> None:
    rows = run_gsm8k(Parrot(), options())
    bare = [replace(row, token_ids=None) for row in rows]
    a = read_run(write_run(tmp_path / "a", rows))
    assert compare_runs(a, read_run(write_run(tmp_path / "b", bare))).same
    bare[3] = replace(bare[3], text=" ####  4")
    [one] = compare_runs(a, read_run(write_run(tmp_path / "c", bare))).divergences
    assert (one.token, one.character) == (None, 6)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2
    assert first_difference("", "a") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 rows, 1 is the least"),
        ("nonsense\n", "a:1 is no line of a run"),
        (header_line({}) + "{}\n", "a:2 is no line of a run"),
        (header_line({}) + 2 * row_line(run_gsm8k(Parrot(), options())[0]), "a:3 is question 19 of pass 0 a second time"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path / "a")


def test_runs_over_other_questions_are_refused(tmp_path: Path) -> None:
    rows = run_gsm8k(Parrot(), options())
    a = read_run(write_run(tmp_path / "a", rows))
    with pytest.raises(ConfigError, match="differ in 20 questions"):
        compare_runs(a, read_run(write_run(tmp_path / "b", [replace(row, question="other") for row in rows])))
    with pytest.raises(ConfigError, match="0 questions in common"):
        compare_runs(a, read_run(write_run(tmp_path / "c", [replace(row, pass_index=7) for row in rows])))


# Replay


def test_replay_asks_each_segment_twice() -> None:
    target = Parrot(cached=4)
    report = run_replay(target, options(), 8)
    assert [(segment.first, segment.questions, segment.cached_tokens) for segment in report.segments] == [(0, 8, (0, 32)), (8, 8, (0, 32)), (16, 4, (0, 16))]
    assert target.seeds[:16] == [*range(100, 108), *range(100, 108)]
    assert (report.divergences, report.cached_tokens, report.prompt_tokens) == ([], 80, 200)
    assert (target.forgotten_at, report.fetched_tokens, report.control_rows) == ([0], None, [])
    assert [row.key for row in report.rows[:9]] == [*((0, i) for i in range(8)), (1, 0)]
    assert segment_line(report.segments[2]) == "questions 16 to 19: 0 differ; prompt tokens from the cache: filling 0, reading back 16, of 40"


def test_control_replay_sees_a_token_that_came_back_differently() -> None:
    target = Parrot(cached=4)
    target.spoilt[3, 2] = {"token_ids": [1, 2, 99]}
    [one] = run_replay(target, options(), 8).divergences
    assert (one.pass_index, one.index, one.token) == (0, 10, 2)


def test_replay_tells_what_was_fetched_and_whether_that_is_enough() -> None:
    report = run_replay(Parrot(cached=4, fetched=4), options(), 20)
    assert (report.fetched_tokens, report.fetched_share, report.segments[0].fetched_tokens) == (80, 1.0, (0, 80))
    assert fetched_lines(report) == ["fetched in pass 1: 80, 100.0% of the 80 reused, 40.0% of the 200 prompt tokens"]
    assert segment_line(report.segments[0]).endswith("; fetched 80, 100.0% of the 80 reused, 40.0% of the 200 prompt tokens")
    [line, remedy] = fetched_lines(run_replay(Parrot(cached=4, fetched=3), options(), 20))
    assert "75.0% of the 80 reused" in line and remedy.startswith("that is below 90%: the pool itself still held the rest")
    assert fetched_lines(run_replay(Parrot(cached=4, fetched=0), options(), 20))[1].startswith("that is below 90%")
    assert fetched_lines(run_replay(Parrot(cached=None), options(), 20)) == ["fetched: not told"]


def test_the_control_reads_each_segment_back_once_more() -> None:
    target = Parrot(cached=4, fetched=4, passes=3)
    for index in range(5):
        target.spoilt[5, index] = {"text": "no", "token_ids": [0]}
    report = run_replay(target, options(), 8, ordering_control=True)
    # What it leaves is wrong, so nothing of it meets the next segment.
    assert target.forgotten_at == [0, 3, 6, 9] and report.divergences == []
    assert [len(segment.control or ()) for segment in report.segments] == [0, 5, 0] and segment_line(report.segments[1]).endswith("; out of order 5 differ")
    assert [row.pass_index for row in report.control_rows] == [2] * 20 and {row.pass_index for row in report.rows} == {0, 1}
    assert control_lines(report) == [
        "flexible-extract: filling 1.0000, reading back 1.0000, out of order 0.7500",
        "control, clears after loads: 5 of 20 answers differ, as they must",
    ]
    blind = run_replay(Parrot(cached=4, fetched=4, passes=3), options(), 8, ordering_control=True)
    assert "0 of 20 answers differ, so this replay cannot find that fault" in control_lines(blind)[1]


def test_a_replay_that_read_nothing_back_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the second pass read 0 of 200 prompt tokens from the cache, so nothing was replayed"):
        run_replay(Parrot(cached=0), options(), 8)
    with pytest.raises(ConfigError, match="segment 0 is below 1"):
        run_replay(Parrot(), options(), 0)


def test_a_server_that_tells_no_cached_tokens_is_believed() -> None:
    report = run_replay(Parrot(cached=None), options(), 20)
    assert report.cached_tokens is None
    assert "reading back not told" in segment_line(report.segments[0])


# The command


def test_the_command_compares_and_ends_with_1_where_runs_differ(tmp_path: Path) -> None:
    rows = run_gsm8k(Parrot(), options())
    a, b = str(write_run(tmp_path / "a", rows)), str(write_run(tmp_path / "b", rows))
    same = CliRunner().invoke(app, ["eval", "compare", a, b])
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "the same, by output")
    c = str(write_run(tmp_path / "c", [replace(rows[0], token_ids=[5]), *rows[1:]]))
    different = CliRunner().invoke(app, ["eval", "compare", a, c, "--json"])
    assert different.exit_code == 1 and '"same": false' in different.stdout
    missing = CliRunner().invoke(app, ["eval", "compare", a, str(tmp_path / "none")])
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr
