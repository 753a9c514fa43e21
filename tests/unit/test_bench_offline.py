"""The serving benchmark's other side: the engine without a server, under the same load, and both in turn."""

import io
import json
import queue
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.bench.serve import ServeRun
from atoll.bench.serve_client import Outcome
from atoll.bench.serve_data import DataOptions
from atoll.bench.serve_launch import Round, _address, launched_server, ratio, ratio_lines, serve_arguments
from atoll.bench.serve_offline import OfflineOptions, offline_load, run_offline
from atoll.bench.serve_report import figures
from atoll.cli import app
from atoll.errors import ConfigError

ENGINE = {"device": "cpu", "dtype": "float32", "kv_format": "fp32", "num_pages": 100, "max_model_len": 128}
OPTIONS = [word for name, value in ENGINE.items() for word in ("--option", f"{name}={value}")]
COMMAND = ["bench", "serve", "--model", "random:tiny", "--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5", "--max-concurrency", "2"]


def options(data: DataOptions, dataset: str = "random", model: str = "random:tiny", path: str = "/v1/completions", **load: Any) -> OfflineOptions:
    return OfflineOptions(model, ENGINE, offline_load(path, **{"max_concurrency": 2, "ignore_eos": True, **load}), dataset, data)


def test_every_request_is_answered_so_many_at_a_time() -> None:
    told: list[None] = []
    run = run_offline(options(DataOptions(7, 20, 5, 0.5), num_warmups=3), lambda: told.append(None))
    found = figures(run)
    assert (found["completed"], found["failed"], found["left"], found["max_concurrent_requests"], len(told)) == (7, 0, 0, 2, 7)
    assert 7 * 10 <= found["total_input_tokens"] <= 7 * 30 and found["total_output_tokens"] == sum(len(one.arrivals_s) for one in run.outcomes)
    assert all(one.start_s < one.arrivals_s[0] <= one.arrivals_s[-1] <= one.end_s and one.finished for one in run.outcomes)


def test_a_conversation_goes_on_when_it_was_answered() -> None:
    run = run_offline(options(DataOptions(6, 8, 4, num_turns=3), "multi-turn", "demo", "/v1/chat/completions", max_concurrency=1))
    lengths = [one.prompt_tokens or 0 for one in run.outcomes]
    assert len(lengths) == 6 and lengths[0] < lengths[1] < lengths[2] > lengths[3] < lengths[4] < lengths[5]


def test_a_request_that_does_not_fit_fails_alone() -> None:
    run = run_offline(options(DataOptions(4, 100, 5, 0.9)))
    errors = [one.error for one in run.outcomes if one.error is not None]
    assert errors and all("at most 127 leave room" in error for error in errors) and len(errors) < len(run.outcomes) == 4


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"max_concurrency": None}, "max_concurrency is not given"),
        ({"request_rate": 3.0}, "request_rate, leave_share or extra_body is given"),
        ({"leave_share": 0.5}, "request_rate, leave_share"),
        ({"extra_body": {"n": 2}}, "request_rate, leave_share"),
    ],
)
def test_what_only_clients_do_is_refused(load: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(DataOptions(1), **load)


def test_options_that_do_not_go_together_are_refused() -> None:
    both = CliRunner().invoke(app, [*COMMAND, "--offline", "--launch"])
    assert both.exit_code == 2 and "give one of them" in both.stderr
    online = CliRunner().invoke(app, [*COMMAND, "--option", "num_pages=3"])
    assert online.exit_code == 2 and "--option is for an engine that this command starts" in online.stderr
    assert "'num_page' is unknown" in CliRunner().invoke(app, [*COMMAND, "--offline", "--option", "num_page=3"]).stderr


def rounds(server: list[int], offline: list[int]) -> list[Round]:
    def run(tokens: int) -> ServeRun:
        good = Outcome(0.0, [1.0], told_output_tokens=tokens)
        return ServeRun([good, Outcome(0.0, [1.0], told_output_tokens=99, error="x")], 2.0)

    return [Round(side, at, run(tokens)) for side, values in (("server", server), ("offline", offline)) for at, tokens in enumerate(values)]  # type: ignore[arg-type]


def test_the_ratio_is_of_medians_over_what_ended_well() -> None:
    found = rounds([90, 10, 100], [100, 110, 120])
    assert ratio(found) == 90 / 110
    assert ratio_lines(found) == [
        "server  output tokens/s: median 45.0, spread 100.0% (45.0, 5.0, 50.0)",
        "offline output tokens/s: median 55.0, spread 18.2% (50.0, 55.0, 60.0)",
        "server / offline: 0.8182",
    ]
    assert ratio(rounds([1], [0])) is None and "nothing ended well" in ratio_lines(rounds([1], [0]))[-1]


def test_engine_options_become_the_servers() -> None:
    given = {"max_num_seqs": 4, "prefix_caching": False, "num_pages": None, "kv_format": "fp32"}
    assert serve_arguments(given) == ["--max-num-seqs", "4", "--no-prefix-caching", "--kv-format", "fp32"]
    assert serve_arguments({"prefix_caching": True}) == ["--prefix-caching"]
    with pytest.raises(ConfigError, match=r"the server did not start: error: num_pages 1 is below 2"), launched_server("demo", {"num_pages": 1}):
        pass


class Told:
    """In stderr's place."""

    def __init__(self) -> None:
        self.written: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def writelines(self, lines: Iterable[str]) -> None:
        self.written.put(list(lines))


def test_the_servers_log_passes_without_a_request_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(sys, "stderr", told)
    log = "loading\ndemo is served at http://127.0.0.1:9/v1, with a page\ntry: curl http://127.0.0.1:9/v1\nERROR: retry: x\nlast\n"
    assert _address(io.StringIO(log)) == "http://127.0.0.1:9"
    assert told.written.get(timeout=30) == ["ERROR: retry: x\n", "last\n"]


def test_the_command_runs_both_sides_under_the_same_load(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(app, [*COMMAND, "--ignore-eos", "--launch", "--rounds", "1", "--json", "--out", str(out), *OPTIONS])
    assert result.exit_code == 0, result.output
    *told, both = map(json.loads, result.stdout.splitlines())
    assert [one["backend"] for one in told] == ["openai", "offline"]
    same = ("completed", "failed", "total_input_tokens", "total_output_tokens", "total_cached_tokens", "max_concurrency", "model_id", "round")
    assert {name: told[0][name] for name in same} == {name: told[1][name] for name in same}
    assert (told[0]["completed"], told[0]["total_input_tokens"], told[0]["total_output_tokens"]) == (6, 120, 30)
    assert both["server_of_offline"] == told[0]["output_throughput"] / told[1]["output_throughput"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and all({"device", "commit", "torch", "output_throughput"} <= row.keys() for row in rows)


def test_a_failed_request_is_exit_code_1() -> None:
    result = CliRunner().invoke(app, [*COMMAND, "--offline", "--json", *OPTIONS, "--random-input-len", "127"])
    assert json.loads(result.stdout)["completed"] == 6 and result.exit_code == 0
    result = CliRunner().invoke(app, [*COMMAND, "--offline", "--json", *OPTIONS, "--random-input-len", "128"])
    assert json.loads(result.stdout)["failed"] == 6 and result.exit_code == 1 and "6 of 6 requests failed" in result.stderr
