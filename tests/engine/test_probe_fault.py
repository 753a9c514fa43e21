"""The fault's table: masked attention never moves, attention that does not mask breaks without the guard and is right with it; and which answers count."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atoll.cli import app
from atoll.engine.output import RequestOutput
from atoll.errors import ConfigError
from atoll.eval.questions import Question
from atoll.kv import ReleaseGuard
from atoll.models import LoadedModel, load_model
from atoll.probe.fault import is_exact, probe_fault
from tests.engine.tiny import CONFIG, ByteTokenizer, TinyLoaded, tiny_model
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

OPTIONS = {"kv_format": "bf16", "num_pages": 80, "max_num_seqs": 4, "max_model_len": 200, "device": "cpu", "dtype": "float32"}
TEXTS = ["the hen had 3 eggs", "she sold 4", "he he he", "what is 12 and 30?", "a longer one, of many more tokens than there are in a page: the the the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    make_folder(path, **CASES["qwen3_5"] | {"eos_token_id": None})
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype=torch.float32)


def questions() -> list[Question]:
    return [Question(text, "so\n#### 7") for text in TEXTS]


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor"])
def test_only_unmasked_attention_without_the_guard_breaks(loaded: LoadedModel, kv_format: str) -> None:
    zeros, poisoned, bare, guarded = probe_fault(loaded, questions(), max_tokens=24, **OPTIONS | {"kv_format": kv_format})
    assert [row.same_tokens for row in (zeros, poisoned, guarded)] == [5, 5, 5]
    assert [row.errors for row in (zeros, poisoned, guarded)] == [0, 0, 0]
    assert bare.same_tokens < 5 and bare.errors > 0
    assert [(row.attention_backend, row.guard, row.kv_fill) for row in (zeros, poisoned, bare, guarded)] == [
        ("reference", False, "zero"),
        ("reference", False, "nan"),
        ("leaky", False, "zero"),
        ("leaky", True, "zero"),
    ]
    assert zeros.image_pages > 40


def test_with_checkpoints_alone_a_warm_up_comes_first(loaded: LoadedModel) -> None:
    zeros, poisoned, _, guarded = probe_fault(loaded, questions(), max_tokens=24, images="checkpoints", **OPTIONS)
    assert [row.same_tokens for row in (zeros, poisoned, guarded)] == [5, 5, 5]
    assert zeros.image_pages == 0


def test_control_a_guard_that_zeroes_nothing_shows(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReleaseGuard, "take", lambda self: [])
    *_, guarded = probe_fault(loaded, questions(), max_tokens=24, **OPTIONS)
    assert guarded.same_tokens < 5 and guarded.errors > 0


def test_a_model_without_states_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model keeps no states, so its pool never holds an image; use a hybrid model"):
        list(probe_fault(TinyLoaded(tiny_model(), CONFIG, ByteTokenizer()), questions(), num_pages=40, max_model_len=200))  # type: ignore[arg-type]


# Answers


@pytest.mark.parametrize(
    ("text", "reason", "exact"), [("#### 7", "stop", True), ("#### 7.", "length", True), ("#### 8", "stop", False), ("#### 7", "error", False)]
)
def test_an_exact_answer(text: str, reason: str, exact: bool) -> None:
    output = RequestOutput(request_id=0, prompt=None, prompt_token_ids=[1], text=text, token_ids=[1], finish_reason=reason)  # type: ignore[arg-type]
    assert is_exact(output, Question("", "#### 7")) == exact


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


# The command


def test_the_command_prints_the_table_and_json(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(json.dumps({"question": text, "answer": "#### 7"}) for text in TEXTS))
    options = ["--option", "num_pages=80", "--option", "max_num_seqs=4", "--option", "max_model_len=200", "--max-tokens", "12"]
    command = ["probe", "fault", "--model", str(folder), "--questions", str(file), "--count", "4", "--device", "cpu", "--dtype", "float32", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "not masked, no guard" in result.stdout and "4 questions" in result.stdout
    result = CliRunner().invoke(app, [*command, "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["same_tokens"] == 4 for row in rows] == [True, True, False, True]
    assert all(row["model"] == str(folder) and row["accuracy"] == row["exact"] / 4 for row in rows)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("num_pages", "option 'num_pages' is not of the form name=value"),
        ("colour=red", "option 'colour' is unknown"),
        ("num_pages=many", "num_pages 'many' is a str"),
    ],
)
def test_the_command_refuses_a_wrong_option(tmp_path: Path, option: str, message: str) -> None:
    file = write(tmp_path / "q.jsonl", '{"question": "a", "answer": "1"}')
    result = CliRunner().invoke(app, ["probe", "fault", "--questions", str(file), "--option", option])
    assert result.exit_code == 2
    assert message in result.output
