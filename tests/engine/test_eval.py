"""The demo model's answers graded offline; two runs are the same, and a run whose attention leaks is not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atoll.cli import app

RUN = ["eval", "gsm8k", "--limit", "4", "--num-fewshot", "0", "--max-tokens", "48", "--device", "cpu", "--option", "max_model_len=256", "--concurrency", "4"]
LEAKY = ["--option", "attention_backend=leaky", "--option", "guard=off", "--option", "kv_fill=nan"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a.jsonl"
    result = invoke(*RUN, "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


def test_a_run_keeps_what_repeats_it(first: Path) -> None:
    header, *rows = (json.loads(line) for line in first.read_text().splitlines())
    given = {"kv_format": "auto", "device": "cpu", "dtype": "auto", "max_num_seqs": 4, "max_model_len": 256}
    assert header["run"]["target"]["options"].items() >= given.items()
    assert header["run"]["target"]["settled"].items() >= {"attention_backend": "reference", "guard": False, "max_model_len": 256}.items()
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3]
    short = next(row for row in rows if row["index"] == 1)
    assert short["split"] == "numbers"
    assert (short["strict"], short["strict_number"], short["finish_reason"], short["num_output_tokens"]) == (False, None, "length", 48)


def test_two_runs_are_the_same_and_a_leaky_one_is_not(first: Path, tmp_path: Path) -> None:
    again, leaky = tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    assert invoke(*RUN, "--out", str(again)).exit_code == 0
    assert invoke("eval", "compare", str(first), str(again)).exit_code == 0
    broken = invoke(*RUN, *LEAKY, "--out", str(leaky))
    assert broken.exit_code == 1 and "errors 4" in broken.stdout
    compared = invoke("eval", "compare", str(first), str(leaky))
    assert compared.exit_code == 1 and "4 of 4 answers differ" in compared.stdout


def test_a_guarded_run_of_leaky_attention_is_the_same(first: Path, tmp_path: Path) -> None:
    out = tmp_path / "guarded.jsonl"
    assert invoke(*RUN, "--option", "attention_backend=leaky", "--option", "guard=on", "--out", str(out)).exit_code == 0
    assert json.loads(out.read_text().splitlines()[0])["run"]["target"]["settled"]["guard"] is True
    assert invoke("eval", "compare", str(first), str(out)).exit_code == 0


def test_a_conversation_goes_through_the_chat_template(tmp_path: Path) -> None:
    out = tmp_path / "chat.jsonl"
    result = invoke(*RUN[:-2], "--concurrency", "1", "--limit", "1", "--chat", "--max-tokens", "128", "--out", str(out), "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["strict"]["value"] == 1.0
    header = json.loads(out.read_text().splitlines()[0])["run"]
    assert (header["chat"], header["sampling"]["stop"]) == (True, [])


REPLAY = ["eval", "replay", "--limit", "3", "--segment", "2", "--num-fewshot", "1", "--max-tokens", "24", "--device", "cpu", "--option", "max_model_len=512"]


def test_what_comes_back_from_the_prefix_cache_says_the_same() -> None:
    result = invoke(*REPLAY, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["same"] and 0 < report["cached_tokens"] < report["prompt_tokens"]
    # The second segment's first pass finds what all prompts begin with.
    assert report["segments"][0]["cached_tokens"][0] == 0
    assert all(segment["cached_tokens"][0] < segment["cached_tokens"][1] for segment in report["segments"])


def test_control_states_that_are_not_restored_show_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.engine.runner.restore_states", lambda slots, pool, copies: None)
    result = invoke(*REPLAY)
    assert result.exit_code == 1
    assert "answers differ" in result.stdout


def test_a_replay_without_a_prefix_cache_is_refused() -> None:
    result = invoke(*REPLAY, "--option", "prefix_caching=false")
    assert result.exit_code == 2
    assert "so nothing was replayed; switch prefix caching on" in result.stderr
