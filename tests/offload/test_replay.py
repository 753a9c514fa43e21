"""`atoll eval replay` through a host tier, in a pool that holds a part of the segment: fetched, the same tokens, and a control that differs."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from atoll.cli import app
from atoll.eval.late_clears import LateClears
from atoll.offload.base import Completion

ASKED = ["--chat", "--num-fewshot", "1", "--own-shots", "--limit", "6", "--segment", "6", "--max-tokens", "6"]
ENGINE = ["--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "512", "--num-pages", "130", "--guard", "on"]
TIERS = ["--offload", "host:64MiB"]


def replay(*options: str, engine: list[str] = ENGINE) -> Result:
    return CliRunner().invoke(app, ["eval", "replay", *ASKED, *engine, *options])


def report(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_fetched_is_resident_and_out_of_order_is_not(kv_format: str) -> None:
    # In fp8 a page is half as large, and a state so many more of them.
    pages = [] if kv_format == "bf16" else ["--num-pages", "150"]
    result = replay("--kv-format", kv_format, *pages, *TIERS, "--ordering-control", "--json")
    assert result.exit_code == 0, result.output
    found = report(result)
    assert found["same"] and found["fetched_share"] >= 0.9 and 0 < found["fetched_tokens"] <= found["cached_tokens"] < found["prompt_tokens"]
    assert found["control"]["differing"] >= 3 and found["segments"][0]["control"]
    assert found["segments"][0]["fetched_tokens"] == [0, found["fetched_tokens"]]


def test_control_the_fault_itself_is_found_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ordering taken out of the replay's own passes."""
    from atoll.eval.engine_target import EngineTarget

    make = EngineTarget.__init__

    def make_faulty(target: EngineTarget, *arguments: Any, **options: Any) -> None:
        make(target, *arguments, **options)
        engine = target.llm.engine
        assert engine.offload is not None
        engine.use_worker(LateClears(engine.offload.worker, engine.pool.buffer))

    monkeypatch.setattr(EngineTarget, "__init__", make_faulty)
    result = replay(*TIERS)
    assert result.exit_code == 1 and "of 6 answers differ" in result.stdout.splitlines()[-1]


def test_control_a_control_that_shows_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(worker: LateClears) -> list[Completion]:
        worker._late.clear()
        return worker._worker.poll()

    monkeypatch.setattr(LateClears, "poll", in_order)
    result = replay(*TIERS, "--ordering-control")
    assert result.exit_code == 1 and "control, clears after loads: 0 of 6 answers differ, so this replay cannot find that fault" in result.stdout


def test_a_pool_that_holds_everything_is_told() -> None:
    result = replay(*TIERS, "--num-pages", "800")
    assert result.exit_code == 0 and "fetched in pass 1: 0, 0.0% of the" in result.stdout
    assert "that is below 90%: the pool itself still held the rest" in result.stdout and "give fewer --num-pages" in result.stdout


@pytest.mark.parametrize(
    "options", [("--ordering-control",), (*TIERS, "--guard", "off", "--ordering-control"), ("--base-url", "http://127.0.0.1:1", "--ordering-control")]
)
def test_a_control_that_cannot_be_had_is_refused_at_once(options: tuple[str, ...]) -> None:
    result = replay(*options)
    assert result.exit_code == 2 and "give --offload and --guard on, and no --base-url" in result.stderr
