"""The offload benchmark: sizes by arithmetic, a gate that sees pages come back wrong, transfers that are told of once. No time is asserted."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from atoll.bench.offload import OffloadCopyOptions, OffloadCopyRow, case_line, copy_line, run_offload_copies
from atoll.bench.offload_decode import DecodeBesideOptions, DecodeBesideRow, decode_line, time_decode_beside
from atoll.bench.offload_fetch import FetchRow, fetch_line
from atoll.cli import app
from atoll.errors import ConfigError
from atoll.models import load_model
from atoll.offload import worker as worker_module
from atoll.offload.runs import Runs, make_runs

SMALL = OffloadCopyOptions(shapes=("tiny",), transfer_bytes=(1 << 16,), limit_bytes=1 << 16, rounds=2)
WAYS_AND_ORDERS = [(way, order) for way in ("load", "store") for order in ("adjacent", "scattered")]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "offload", "--device", "cpu", *arguments])


def test_every_way_and_order_is_a_row() -> None:
    report = run_offload_copies(SMALL)
    assert report.gate_failures == []
    assert [(row.way, row.order) for row in report.rows] == WAYS_AND_ORDERS
    for row in report.rows:
        # By hand: one attention layer, K and V, 2 heads, 16 tokens, 64 values of 2 bytes.
        assert (row.page_bytes, row.num_pages, row.moved_bytes) == (8192, 8, 1 << 16)
        assert (row.issue, row.pinned, row.rounds, row.note) == ("thread", False, 2, None)
        assert row.wall_us and row.host_us and row.limit_gbps and row.gbps
        assert row.gbps == pytest.approx(row.moved_bytes / row.wall_us / 1e3)
        assert row.share == pytest.approx(row.gbps / row.limit_gbps)
        assert row.host_us <= row.wall_us


def test_the_page_of_the_published_shape() -> None:
    [row, *_] = run_offload_copies(OffloadCopyOptions(shapes=("qwen3.5-35b-a3b",), transfer_bytes=(1 << 20,), limit_bytes=1, rounds=1)).rows
    assert (row.page_bytes, row.num_pages) == (10 * 2 * 2 * 16 * 256 * 2, 3)


def test_the_gate_sees_pages_that_come_back_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order_of_slots(pages: Sequence[int], slots: Sequence[int]) -> Runs:
        return make_runs(sorted(pages), sorted(slots))

    monkeypatch.setattr(worker_module, "make_runs", in_order_of_slots)
    report = run_offload_copies(SMALL)
    assert report.gate_failures == ["tiny bf16 thread: scattered pages came back with other bytes"]
    assert all(row.wall_us is None and row.note == "scattered pages came back with other bytes" for row in report.rows)


def test_counts_out_of_range() -> None:
    for options in (OffloadCopyOptions(transfer_bytes=()), OffloadCopyOptions(transfer_bytes=(0,)), OffloadCopyOptions(rounds=0)):
        with pytest.raises(ConfigError, match="below 1"):
            run_offload_copies(options)
    with pytest.raises(ConfigError, match="not all known"):
        run_offload_copies(OffloadCopyOptions(issues=()))


@pytest.fixture(scope="module")
def decode_rows() -> list[DecodeBesideRow]:
    options = DecodeBesideOptions(batch=2, context=20, transfer_bytes=1 << 16, rounds=2, steps=2)
    return time_decode_beside(load_model("demo", device=torch.device("cpu"), dtype=None), options)


def test_decode_steps_beside_each_way(decode_rows: list[DecodeBesideRow]) -> None:
    assert [row.beside for row in decode_rows] == ["none", "load", "store", "both"]
    alone = decode_rows[0]
    assert (alone.ratio, alone.covered, alone.moved_gbps, alone.graph) == (None, None, 0.0, False)
    for row in decode_rows[1:]:
        assert row.num_steps == 4 and row.ratio == pytest.approx(row.step_us / alone.step_us)
        assert row.moved_gbps > 0 and row.covered is not None and 0 <= row.covered <= 1
        assert 0 < row.issue_us < row.step_us


def test_a_context_that_the_model_does_not_have() -> None:
    loaded = load_model("demo", device=torch.device("cpu"), dtype=None)
    with pytest.raises(ConfigError, match="is outside 2 to"):
        time_decode_beside(loaded, DecodeBesideOptions(context=1))
    with pytest.raises(ConfigError, match="one of which is below 1"):
        time_decode_beside(loaded, DecodeBesideOptions(context=20, steps=0))


def test_lines(decode_rows: list[DecodeBesideRow]) -> None:
    row = OffloadCopyRow("x", "bf16", 16, 1000, 2, 2000, "load", "scattered", "batch", True, note="the gate")
    assert case_line(row) == "x bf16 page 16: 2 pages of 1000 bytes, host pages pinned"
    assert copy_line(row) == "  load  scattered batch : not measured: the gate"
    row.wall_us, row.device_us, row.host_us, row.limit_gbps = 1.0, 0.9, 0.5, 4.0
    assert copy_line(row) == "  load  scattered batch :    2.00 GB/s, 50.0% of 4.00;       1.0 us,       0.9 on the copy's clock,     0.5 to issue"
    assert decode_line(decode_rows[0]).endswith(" us a step")
    fetch = FetchRow("x", 64, "bf16", 16, "host:1MiB", 48, 48, [0.4, 0.5, 0.6], [0.01] * 3, [0.02] * 3, 2_000_000, 0.001)
    assert fetch_line(fetch) == ("x bf16: first token of 64: computed 500.0 ms, fetched 20.0 (25.0 times; 48 tokens, 2.0 MB in 1.0 ms), resident 10.0")


def test_the_command_writes_rows_of_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = (
        "--parts",
        "copies,decode",
        "--shape",
        "tiny",
        "--transfer-mib",
        "1",
        "--batch",
        "1",
        "--decode-context",
        "20",
        "--rounds",
        "1",
        "--steps",
        "1",
    )
    result = invoke(*arguments, "--out", str(path), "--commit", "abc", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in result.stdout.splitlines()] == rows
    assert [row["part"] for row in rows] == ["copies"] * 4 + ["decode"] * 4
    assert all(row["commit"] == "abc" and row["device"].startswith("cpu") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--parts", "copies,fetch"), "'fetch'"),
        (("--model", "random:qwen3.5-35b-a3b"), "needs a GPU"),
        (("--transfer-mib", "0"), "--transfer-mib '0'"),
    ],
)
def test_mistakes_of_the_command(arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and words in result.output.replace("\n", " ")
