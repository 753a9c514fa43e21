"""The sweep of tunings without a GPU: what is built once, what may not be timed, what is kept of a sweep that ends early. No time is asserted."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atoll.bench import tune
from atoll.bench.compile import Variant
from atoll.bench.decode import DecodeBenchOptions
from atoll.bench.gate import own_fault
from atoll.bench.rows import append_jsonl, read_decode_rows
from atoll.bench.shapes import DecodeShape, ModelHeads
from atoll.bench.tune import Tuned
from atoll.bench.workload import BenchPool
from atoll.cli import app
from atoll.ops.attention import DecodeConfig, decode_attention, gluon_decode_sm90, plan_decode

CPU = torch.device("cpu")
SHAPE = DecodeShape(ModelHeads("tiny", 1, 4, 32), "bf16", 16, 1, 2, 512)
DEFAULT, WRONG, GOOD = (DecodeConfig(num_splits=n) for n in (1, 2, 4))


def test_a_kernel_is_built_once_whatever_it_is_launched_with_and_each_backends_own() -> None:
    one = Variant(SHAPE, True, DecodeConfig(num_splits=2), "triton")
    same = [
        replace(one, config=replace(one.config, num_splits=8, tiles_per_split=16, peel_above=4)),
        replace(one, shape=replace(SHAPE, batch=64, ctx=4096)),
    ]
    assert {variant.key() for variant in same} == {one.key()}
    programs = replace(one, config=DecodeConfig(num_programs=132))
    assert replace(programs, config=DecodeConfig(num_programs=66)).key() == programs.key() == replace(programs, shape=replace(SHAPE, batch=32)).key()
    others = [
        replace(one, backend="gluon_sm90"),
        replace(one, mask_unowned_kv=False),
        replace(one, config=DecodeConfig(num_splits=1)),
        replace(one, config=DecodeConfig(num_splits=9)),
        replace(one, config=DecodeConfig(num_splits=33)),
        replace(one, config=DecodeConfig(num_splits=2, tile=32)),
        replace(one, config=DecodeConfig(num_splits=2, max_registers=128)),
        programs,
        replace(programs, shape=replace(SHAPE, batch=33)),
    ]
    assert len({one.key(), *(variant.key() for variant in others)}) == 1 + len(others)


def test_a_kernel_whose_programs_each_have_a_multiprocessor_is_built_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = SHAPE.batch * SHAPE.heads.num_kv_heads
    monkeypatch.setattr(gluon_decode_sm90, "num_sms", lambda device: 4 * programs)
    for backend, apart in (("gluon_sm90", True), ("triton", False)):
        few, many = (Variant(SHAPE, True, DecodeConfig(num_splits=n), backend).key() for n in (4, 5))
        assert few == Variant(SHAPE, True, DecodeConfig(num_splits=3), backend).key()
        assert (few != many) is apart


def measured(monkeypatch: pytest.MonkeyPatch, deadline: float | None = None, refused: DecodeConfig | None = None) -> tuple[Tuned, list[Tuned]]:
    """One pass over DEFAULT, WRONG and GOOD, of which WRONG fails its check and `refused` does not fit."""
    told = list[Tuned]()
    monkeypatch.setattr(tune, "compile_variants", lambda variants, jobs: {v: "too large" for v in variants if v.config == refused})
    monkeypatch.setattr(tune, "own_fault", lambda work, plan, out: (1.0, "error 1 is above") if plan.config == WRONG else own_fault(work, plan, out))
    # A key per tuning, so that one of them can be refused.
    monkeypatch.setattr(Variant, "key", lambda self: self.config)
    tuned = Tuned(SHAPE, "reference", DEFAULT)
    options = DecodeBenchOptions(device=CPU, rounds=1)
    tune._measure([tuned], lambda tuned: [DEFAULT, WRONG, GOOD], BenchPool([SHAPE], CPU), "reference", options, 1, deadline, told.append)
    return tuned, told


def test_a_tuning_that_answers_wrongly_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, told = measured(monkeypatch)
    assert told == [tuned] and set(tuned.times_us) == {DEFAULT, GOOD} and tuned.refused == {WRONG: "error 1 is above"}
    assert "t64.ns2.w4.s3 left out: error 1 is above" in tuned.line()
    notes = {row.config: (row.backend, row.note, row.run, row.time_us is None) for row in tuned.rows(0, "a")}
    assert notes["t64.ns2.w4.s3"] == ("reference", "error 1 is above", "a", True) and notes["t64.ns4.w4.s3"] == ("reference", None, "a", False)


def test_a_default_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, _ = measured(monkeypatch, refused=DEFAULT)
    assert tuned.best == GOOD and "default t64.ns1.w4.s3 not measured: too large | best t64.ns4.w4.s3" in tuned.line()


def test_after_the_budget_no_case_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, told = measured(monkeypatch, deadline=time.monotonic() - 1)
    assert told == [] and tuned.times_us == {}


def test_a_case_is_in_the_file_before_the_next_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "rows.jsonl", list[int]()

    def run(options: DecodeBenchOptions, on_case: tune.Callable[[Tuned], None]) -> list[Tuned]:
        all_tuned = [Tuned(SHAPE, "reference", DEFAULT, {DEFAULT: 2.0}) for _ in range(3)]
        for tuned in all_tuned[:2]:
            seen.append(len(read_decode_rows(path)))
            on_case(tuned)
        return all_tuned

    monkeypatch.setattr(tune, "run_tune", run)
    result = CliRunner().invoke(app, ["bench", "decode", "--tune", "--device", "cpu", "--commit", "abc", "--out", str(path)])
    assert result.exit_code == 0 and seen == [0, 1] and "1 cases were left out (time budget)" in result.stderr


@pytest.mark.parametrize("mask", [True, False])
def test_what_may_not_be_timed(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = BenchPool([SHAPE], CPU).workload(SHAPE)
    plan = plan_decode(SHAPE.spec(mask_unowned_kv=mask), work.lengths, work.tables[0], backend="reference")
    out, _ = decode_attention(work.q, work.kv, plan)
    error, fault = own_fault(work, plan, out)
    assert error < 0.01 and fault is None
    assert (own_fault(work, plan, out * 1.1)[1] or "").startswith("error 0.1 against the reference is above")
    monkeypatch.setattr("atoll.bench.gate.leaks", lambda work, plan: True)
    # An unmasked kernel leaks, and may.
    assert own_fault(work, plan, out)[1] == ("an unowned row reached the output" if mask else None)


def test_the_reference_is_computed_once_for_all_kernels_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    work = BenchPool([SHAPE], CPU).workload(SHAPE)
    assert work.reference is work.reference and work.reference[1].dtype == torch.float32


def test_rows_of_a_case_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, writes = tmp_path / "rows.jsonl", list[int]()
    opened = Path.open

    def watched(self: Path, *arguments: object, **options: object) -> object:
        file = opened(self, *arguments, **options)  # type: ignore[call-overload]

        class File:
            def __enter__(self) -> "File":
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                writes.append(len(data))
                file.write(data)

        return File()

    monkeypatch.setattr(Path, "open", watched)
    # More than a buffered file would take in one.
    append_jsonl(path, [{"a": "x" * 5000}] * 4)
    monkeypatch.undo()
    assert writes == [path.stat().st_size] and len(path.read_text().splitlines()) == 4
