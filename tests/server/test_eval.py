"""`atoll eval` over HTTP: the figure of the engine in this process again, the same tokens however many are asked at a time, and a leak that shows."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atoll.cli import app
from atoll.eval.questions import DEMO_PROBLEMS
from tests.server.test_shutdown import server_process

pytestmark = pytest.mark.slow

# Of the last ones the model has not seen the templates, so that some answers are wrong. All 1,319 are asked without --data and --max-tokens.
ASKED = [*range(12), *range(1000, 1004)]
OPTIONS = ["--chat", "--max-tokens", "80"]
ENGINE = ["--max-model-len", "256", "--num-pages", "400", "--max-num-seqs", "16"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    lines = DEMO_PROBLEMS.read_text().splitlines()
    (path / "asked.jsonl").write_text("".join(lines[index] + "\n" for index in ASKED))
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(*ENGINE) as (_, url):
        yield url


def ask(folder: Path, name: str, *options: str) -> Result:
    """A run, kept as `name`."""
    return invoke("eval", "gsm8k", "--data", str(folder / "asked.jsonl"), *OPTIONS, "--out", str(folder / name), *options)


def ask_server(folder: Path, name: str, url: str, concurrency: int) -> Result:
    return ask(folder, name, "--base-url", url, "--extra-body", '{"return_token_ids": true}', "--concurrency", str(concurrency))


@pytest.fixture(scope="module")
def over_http(folder: Path, url: str) -> Path:
    result = ask_server(folder, "http.jsonl", url, 16)
    assert result.exit_code == 0, result.output
    return folder / "http.jsonl"


def compare(a: Path, b: Path) -> tuple[int, dict[str, object]]:
    result = invoke("eval", "compare", str(a), str(b), "--json")
    return result.exit_code, json.loads(result.stdout)


def test_the_figure_is_that_of_the_engine_in_this_process(folder: Path, over_http: Path) -> None:
    options = ["--option", "max_model_len=256", "--option", "num_pages=400", "--device", "cpu", "--concurrency", "16", "--json"]
    report = json.loads(ask(folder, "offline.jsonl", *options).stdout)
    assert 0 < report["strict"]["value"] < 1
    code, found = compare(folder / "offline.jsonl", over_http)
    assert code == 0 and found["same"] and found["by"] == "output"
    assert (found["answers"], found["divergences"], found["strict"]["difference"]) == (len(ASKED), [], 0)
    rows = [json.loads(line) for line in over_http.read_text().splitlines()[1:]]
    assert all(row["token_ids"] for row in rows), "tokens were not compared"


def test_another_concurrency_gives_the_same_tokens(folder: Path, url: str, over_http: Path) -> None:
    assert ask_server(folder, "few.jsonl", url, 5).exit_code == 0
    assert compare(over_http, folder / "few.jsonl")[0] == 0


def test_control_attention_that_leaks_shows(folder: Path, over_http: Path) -> None:
    # At the level of errors, or the warning about this backend would come before the address.
    leaky = ["--attention-backend", "leaky", "--guard", "off", "--kv-fill", "nan", "--log-level", "error"]
    with server_process(*ENGINE, *leaky) as (_, url):
        result = ask_server(folder, "leaky.jsonl", url, 16)
    assert result.exit_code == 1
    assert f"{len(ASKED)} answers ended in an error:\n  {len(ASKED)} x 500: the logits after " in result.stderr and "leaky" in result.stderr
    code, found = compare(over_http, folder / "leaky.jsonl")
    assert code == 1 and not found["same"] and len(found["divergences"]) == len(ASKED)
