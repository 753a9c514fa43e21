"""The checkpoint benchmark: sizes by arithmetic, a gate that sees a wrong copy or clear, calls that move other bytes each time. No time is asserted."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from atoll.bench import checkpoint as bench
from atoll.bench import timing
from atoll.bench.checkpoint import CheckpointBenchOptions, CheckpointRow, case_lines, run_checkpoint
from atoll.cli import app
from atoll.engine.step import StateCopy
from atoll.errors import AtollError, ConfigError, ModelError, SpecError
from atoll.kv.images import restore_states
from atoll.kv.layout import PageLayout
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool

SMALL = CheckpointBenchOptions(kv_formats=("bf16",), page_sizes=(16,), states=(1, 3), tokens=(40,), rounds=1)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "checkpoint", "--device", "cpu", *arguments])


def sizes(row: CheckpointRow) -> tuple[object, ...]:
    return row.operation, row.num_states, row.num_tokens, row.num_pages, row.moved_bytes


def test_sizes_of_the_published_shape() -> None:
    # By hand: 30 layers of 32 x 128 x 128 fp32 and 8192 x 3 bf16; 10 layers of K and V, 2 heads, 16 tokens, 256 values of 2 bytes.
    slot_bytes, page_bytes = 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), 10 * 2 * 2 * 16 * 256 * 2
    config, slot_layout = bench._check_shape("qwen3.5-35b-a3b")
    layout = PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, 16)
    rows = bench._make_rows("35b", slot_layout, layout, CheckpointBenchOptions(states=(1, 64), tokens=(1000,)), None)
    assert {(row.slot_bytes, row.page_bytes, row.image_pages, row.image_tokens) for row in rows} == {(slot_bytes, page_bytes, 197, 3152)}
    assert [sizes(row) for row in rows] == [
        ("save", 1, None, 197, 2 * slot_bytes),
        ("save", 64, None, 12608, 128 * slot_bytes),
        ("restore", 1, None, 197, 2 * slot_bytes),
        ("restore", 64, None, 12608, 128 * slot_bytes),
        ("clear", 1, None, 197, 197 * page_bytes),
        ("clear", None, 1000, 63, 63 * page_bytes),
    ]


def test_the_command_writes_a_row_for_each_case(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--shape", "tiny, demo", "--page-size", "16,64", "--states", "1,3", "--tokens", "40", "--rounds", "1", "--step-us", "2000")
    result = invoke(*arguments, "--out", str(path), "--commit", "abc", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in result.stdout.splitlines()] == rows
    cases = itertools.product(("tiny", "demo"), ("bf16", "fp8_tensor", "fp8_token"), (16, 64))
    assert list(dict.fromkeys((row["shape"], row["kv_format"], row["page_size"]) for row in rows)) == list(cases)
    assert len(rows) == 12 * 6
    for row in rows:
        # Without a GPU the wall's clock is the only one.
        assert (row["device_us"], row["read_gbps"], row["read_share"], row["note"]) == (None, None, None, None)
        assert row["gbps"] == pytest.approx(row["moved_bytes"] / row["wall_us"] / 1e3)
        assert row["us_per_page"] == pytest.approx(row["wall_us"] / row["num_pages"])
        assert row["host_us"] <= row["wall_us"] and row["image_tokens"] == row["image_pages"] * row["page_size"]
        assert row["step_share"] == (pytest.approx(row["wall_us"] / 2000) if row["operation"] == "clear" else None)
        assert row["commit"] == "abc" and row["device"].startswith("cpu")


def test_text_of_a_case() -> None:
    row = CheckpointRow("x", "bf16", 16, 3000000, 1000000, 3, "save", 1, None, 3, 6000000, note="the gate")
    measured = replace(row, wall_us=30.0, wall_spread=0.1, host_us=20.0, device_us=10.0, read_gbps=1000.0)
    clear = replace(measured, operation="clear", num_states=None, num_tokens=32, num_pages=2, moved_bytes=2000000, step_us=1000.0)
    assert case_lines([row, measured, clear]) == [
        "x bf16 page 16: slot 3.000 MB, page 1.000 MB, an image takes 3 pages or 48 tokens",
        "  save        1 state       3 pages: not measured: the gate",
        "  save        1 state       3 pages:      10.0 us on the device,      30.0 us a call (20.0 host),   600.0 GB/s read and written, 60% of a plain read",
        "  clear      32 tokens      2 pages:      10.0 us on the device,      30.0 us a call (20.0 host),   200.0 GB/s written, 20% of a plain read, "
        "5.000 us a page, 1.00% of a step",
    ]


def test_consecutive_calls_move_other_bytes() -> None:
    assert bench._take_turns(list(range(10)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    assert bench._take_turns([5, 6], 2) == [[5, 6]] * 4


# The gate


def restore_other_pages(slots: SlotPool, pool: PagePool, copies: Sequence[StateCopy]) -> None:
    restore_states(slots, pool, [replace(copy, pages=copy.pages[::-1]) for copy in copies])


def restore_other_slot(slots: SlotPool, pool: PagePool, copies: Sequence[StateCopy]) -> None:
    first, second, *others = copies
    restore_states(slots, pool, [replace(first, state_slot=second.state_slot), replace(second, state_slot=first.state_slot), *others])


def restore_none(slots: SlotPool, pool: PagePool, copies: Sequence[StateCopy]) -> None:
    pass


@pytest.mark.parametrize(("restore", "num_wrong"), [(restore_other_pages, 3), (restore_other_slot, 2), (restore_none, 3)])
def test_control_a_wrong_copy_is_told_and_not_timed(restore: Callable[..., None], num_wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "restore_states", restore)
    report = run_checkpoint(SMALL)
    fault = f"{num_wrong} of 3 restored states are not what was saved"
    assert report.gate_failures == [f"tiny bf16 page 16: {fault}"]
    assert [(row.wall_us, row.device_us, row.gbps, row.note) for row in report.rows] == [(None, None, None, fault)] * 6


@pytest.mark.parametrize("cleared", [lambda pages: pages[:-1], lambda pages: [*pages, 0], lambda pages: []])
def test_control_a_wrong_clear_is_told_and_ends_the_command_with_1(cleared: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PagePool.clear
    monkeypatch.setattr(PagePool, "clear", lambda pool, pages: clear(pool, cleared(pages)))
    result = invoke("--kv-format", "fp8_token", "--page-size", "16", "--states", "2", "--tokens", "100")
    assert result.exit_code == 1
    assert result.stderr == "gate failed: tiny fp8_token page 16: a clear of 7 pages left bytes in them, or changed another page\n"
    assert result.stdout.count("not measured: a clear of 7 pages") == 4


def test_a_case_that_runs_out_of_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = bench._measure

    def measure_small(rows: list[CheckpointRow], *others: object) -> str | None:
        if rows[0].page_size == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        return measure(rows, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "_measure", measure_small)
    report = run_checkpoint(replace(SMALL, page_sizes=(16, 64)))
    assert [row.note for row in report.rows] == ["ran out of memory: CUDA out of memory. Tried"] * 6 + [None] * 6
    assert [row.wall_us is None for row in report.rows] == [True] * 6 + [False] * 6
    assert report.gate_failures == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (replace(SMALL, shapes=("smollm2",)), ConfigError, "shape 'smollm2' has no linear-attention layer, so no state to checkpoint; use qwen3.5-35b-a3b"),
        (replace(SMALL, shapes=("7b",)), ModelError, "model '7b' does not exist here"),
        (replace(SMALL, kv_formats=("fp4",)), SpecError, "kv_format 'fp4' is unknown"),
        (replace(SMALL, page_sizes=(24,)), SpecError, "page_size 24"),
        (replace(SMALL, states=()), ConfigError, r"states \(\) holds none, or one below 1"),
        (replace(SMALL, tokens=(5, 0)), ConfigError, r"tokens \(5, 0\) holds none, or one below 1"),
    ],
)
def test_options_out_of_range(options: CheckpointBenchOptions, error: type[AtollError], message: str) -> None:
    with pytest.raises(error, match=message):
        run_checkpoint(options)


def test_the_large_shape_is_refused_on_a_cpu() -> None:
    result = invoke("--shape", "qwen3.5-35b-a3b")
    assert result.exit_code == 2 and "needs a GPU for the shape 'qwen3.5-35b-a3b', this is cpu; pass --shape tiny" in result.stderr


# The clocks


class HeldDevice:
    """A device that is busy for as many calls as its hold is long; a call takes it 5 us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds: list[int] = []
        self.queued = 0
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.at = -1

            def record(self) -> None:
                self.at = device.queued

            def query(self) -> bool:
                return device.queued >= device.holds[-1]

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) * 5e-3

        monkeypatch.setattr(timing.torch.cuda, "Event", Event)
        monkeypatch.setattr(timing.torch.cuda, "_sleep", self.hold)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: None)

    def hold(self, cycles: int) -> None:
        self.holds.append(cycles // timing._HOLD_CYCLES_PER_US)
        self.queued = 0

    def call(self) -> None:
        self.queued += 1


def test_a_sample_that_the_host_did_not_queue_in_time_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldDevice(monkeypatch)
    # Four calls need a hold above 4 us: 2 and 4 are too short.
    found = timing.time_queued([held.call] * 4, torch.device("cuda"), 0.25, rounds=3)
    assert found is not None and found.median_us == pytest.approx(5.0)
    assert held.holds == [2, 4, 8, 8, 8]


def test_calls_that_wait_for_the_device_have_no_time_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldDevice(monkeypatch)
    assert timing.time_queued([held.call] * 4, torch.device("cuda"), 0.01, rounds=3) is None
    assert len(held.holds) == timing.MAX_SHORT_HOLDS + 1


def test_eager_calls_are_each_made_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    ticks = itertools.chain.from_iterable((start, start + 6.0, start + 8.0) for start in (0.0, 10.0, 20.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    found = timing.time_eager([lambda: made.append("a"), lambda: made.append("b")], torch.device("cpu"), rounds=3)
    assert made == ["a", "b"] * 3
    assert (found.wall.median_us, found.host_us) == (4e6, 3e6)
    assert timing.time_queued([lambda: None], torch.device("cpu"), 1.0) is None


@pytest.mark.gpu
def test_a_gpu_gives_both_clocks(device: torch.device) -> None:
    report = run_checkpoint(replace(SMALL, shapes=("demo",), kv_formats=("bf16", "fp8_token"), device=device))
    assert report.gate_failures == []
    assert len(report.rows) == 12
    for row in report.rows:
        assert row.wall_us is not None and row.device_us is not None and row.read_share is not None


@pytest.mark.gpu
def test_calls_that_synchronize_are_not_timed_on_the_device(device: torch.device) -> None:
    x = torch.zeros(10, device=device)
    assert timing.time_queued([x.sum().item], device, 20.0) is None
    assert timing.time_queued([x.sum], device, 20.0) is not None
