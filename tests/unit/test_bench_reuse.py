"""`bench reuse`: what is counted is what a scheduler reuses, the ideal is the ideal, and length does not change the rate."""

import json
from itertools import count

import pytest
from typer.testing import CliRunner

from atoll.bench import reuse
from atoll.bench.reuse import FirstTokenRow, ReuseOptions, ideal_tokens, measure, report_lines, time_first_token
from atoll.cli import app
from atoll.engine.request import Request
from atoll.engine.sampling import SamplingParams
from tests.engine.tiny import make_llm, prompts

OPTIONS = ReuseOptions(num_pages=20_000)


def request(prompt: list[int], outputs: list[int]) -> Request:
    return Request(0, prompt, SamplingParams(), 0, 16, output_token_ids=outputs)


def test_the_ideal_is_whole_pages_that_came_before() -> None:
    first = request([1] * 10, [2, 2, 3])
    # Of the 13 tokens the last is never computed: pages of 4 end at 4, 8 and 12.
    assert ideal_tokens([first], 4) == 0
    assert ideal_tokens([first, request([1] * 10 + [2, 2, 3, 4], [])], 4) == 12
    assert ideal_tokens([first, request([1] * 10 + [2, 2], [])], 4) == 8, "its last token is computed"
    assert ideal_tokens([first, request([1] * 7, []), request([9] * 9, []), request([9] * 9, [])], 4) == 4 + 0 + 8


@pytest.mark.parametrize("workload", ["chat", "shared in turn", "same prompt"])
def test_all_policies_together_come_near_the_ideal(workload: str) -> None:
    row = measure(OPTIONS, workload, "all")
    assert row.of_ideal is not None and row.of_ideal > 0.97
    assert row.num_tokens == row.num_reused + sum(row.misses.values())


def test_each_policy_serves_what_it_is_made_for() -> None:
    found = {name: measure(OPTIONS, "same prompt", name).of_ideal for name in ("prompt", "demand", "end", "ladder")}
    assert found["prompt"] == 1 and found["end"] == found["ladder"] == 0
    # The second leaves the state, six of seven use it.
    assert found["demand"] == pytest.approx(6 / 7)
    assert (measure(OPTIONS, "chat", "end").of_ideal or 0) > 0.98 > 0.9 > (measure(OPTIONS, "chat", "prompt").of_ideal or 0) > 0.8


def test_a_model_without_states_reuses_all() -> None:
    row = measure(ReuseOptions(image_pages=0), "chat", "all")
    assert row.of_ideal == 1 and row.num_saved == 0


@pytest.mark.parametrize("num_pages", [20_000, 900])
def test_a_longer_prompt_changes_the_rate_by_little(num_pages: int) -> None:
    rows = [measure(ReuseOptions(num_pages=num_pages), "same prompt", "all", shift) for shift in (0, 1, 15, 16, 37, 100)]
    shares = [row.of_ideal or 0 for row in rows]
    # Up to 48 of 2,100 tokens: a state is kept every 64 tokens, a page holds 16.
    assert max(shares) - min(shares) < 0.024 and max(shares) == 1
    [line] = report_lines(rows)
    assert "100.0% of the ideal (97.6% to 100.0% over 6 lengths)" in line


def test_warm_and_cold_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(reuse.time, "perf_counter", lambda: float(next(ticks)))
    row = time_first_token(make_llm(), "tiny", prompts(2)[1], rounds=3)
    assert (row.prompt_tokens, row.reused_tokens) == (90, 80)
    assert row.cold_s == row.warm_s == [1.0] * 3
    assert FirstTokenRow("tiny", 90, 80, [4.0, 2.0, 9.0], [1.0, 2.0, 2.0]).speedup == 2


def test_the_command_writes_rows() -> None:
    result = CliRunner().invoke(app, ["bench", "reuse", "--json", "--shifts", "0", "--num-pages", "3000", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 4 * 5 and {row["image_pages"] for row in rows} == {197}
    assert all(row["num_reused"] <= row["num_ideal"] <= row["num_tokens"] for row in rows)
    assert "of the ideal" in result.stderr
    assert (
        "--shifts 'a' is not a list of numbers that are not negative; write for example 0,16"
        in CliRunner().invoke(app, ["bench", "reuse", "--shifts", "a"]).stderr
    )
