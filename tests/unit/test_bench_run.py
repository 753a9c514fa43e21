"""A long decode run on a CPU: it goes on where it ended, times backends and peers beside each other, and loses no more than a cell to a peer's fault."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from atoll.bench import peers
from atoll.bench.decode import DecodeBenchOptions, DecodeReport, run_decode
from atoll.bench.peers import compile_peers, decode_problem, peer_calls, peer_key
from atoll.bench.report import case_lines, summary_lines, variant_key
from atoll.bench.rows import DecodeRow
from atoll.bench.shapes import DecodeShape, ModelHeads, full_shapes
from atoll.bench.workload import BenchPool, cold_copies, pool_bytes
from atoll.cli import app
from atoll.errors import BackendError, ConfigError
from atoll.probe import DecodeProblem
from atoll.probe.adapters import get_adapter

CPU = torch.device("cpu")
ONE, TWO = "35b-tp1/bf16/p64/q1/1x1024", "p64/q1/1x1024"
PeerCall = Callable[[], tuple[torch.Tensor, None]]


def run(**options: object) -> DecodeReport:
    return run_decode(DecodeBenchOptions(**{"name_filter": ONE, "rounds": 1, "device": CPU} | options))  # type: ignore[arg-type]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", "--rounds", "1", "--commit", "abc", *arguments])


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--filter", TWO, "--run", "full", "--out", str(path))
    assert invoke(*arguments, "--limit", "1").exit_code == 0
    assert {row["case"] for row in rows_of(path)} == {ONE}
    assert invoke(*arguments).exit_code == 0
    cases = [row["case"] for row in rows_of(path)]
    assert len(cases) == 2 * 3 and len(set(cases)) == 2 and {row["run"] for row in rows_of(path)} == {"full"}
    # Nothing is left, so nothing is measured.
    before = path.read_text()
    assert invoke(*arguments).exit_code == 0 and path.read_text() == before
    # Another run of the same file begins anew.
    assert invoke("--filter", ONE, "--run", "other", "--out", str(path)).exit_code == 0
    assert len(rows_of(path)) == 3 * 3


def test_rows_are_in_the_file_before_the_next_case_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "rows.jsonl", list[int]()
    workload = BenchPool.workload

    def watched(self: BenchPool, shape: DecodeShape, *, cold: bool = False) -> object:
        seen.append(len(rows_of(path)))
        return workload(self, shape, cold=cold)

    monkeypatch.setattr(BenchPool, "workload", watched)
    assert invoke("--filter", TWO, "--out", str(path)).exit_code == 0
    assert seen == [0, 3]


def test_a_budget_that_is_used_up_ends_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--filter", ONE, "--run", "full", "--out", str(path))
    ended = invoke(*arguments, "--budget-s", "0")
    assert ended.exit_code == 0 and rows_of(path) == []
    assert "1 cases were left out (time budget, or interrupted); with --run the same command goes on" in ended.stderr
    assert invoke(*arguments).exit_code == 0 and len(rows_of(path)) == 3


def test_a_run_of_another_commit_is_not_gone_on_with(tmp_path: Path) -> None:
    arguments = ("--filter", ONE, "--run", "full", "--out", str(tmp_path / "rows.jsonl"))
    assert invoke(*arguments).exit_code == 0
    result = invoke(*arguments, "--commit", "def")
    assert result.exit_code == 2 and "is of commit abc on cpu" in result.stderr and "give --run another name" in result.stderr
    assert "--run full has no file to go on from; give --out too" in invoke("--run", "full").stderr


def test_only_the_l2_states_that_a_case_lacks_are_measured() -> None:
    shape = full_shapes()[0]
    options = DecodeBenchOptions(l2=("warm", "cold"), measured=frozenset({(shape.name, "warm")}))
    assert options.states(shape) == ["cold"]
    assert DecodeBenchOptions(device=CPU, measured=frozenset({(shape.name, None)})).states(shape) == []


def test_backends_of_ours_are_timed_masked_beside_the_first() -> None:
    report = run(backend="reference", beside=("reference", "gluon_sm90"))
    first = [("reference", True, 0), ("reference", True, 1), ("reference", False, 0)]
    # The first's second name is the first; what refuses says why.
    assert [variant_key(row) for row in report.rows] == [*first, ("gluon_sm90", True, 0)]
    assert report.rows[-1].time_us is None and "is not an NVIDIA GPU of compute capability 9.0" in (report.rows[-1].note or "")
    assert all(row.time_us is not None for row in report.rows[:3])


def test_another_backend_is_compared_by_its_name() -> None:
    rows = [DecodeRow("a", 1, 1024, backend, True, 0, "warm", 1000, 10, time) for backend, time in (("gluon_sm90", 8.0), ("triton", 10.0))]
    assert "masked against triton: geomean -20.00%" in "\n".join(summary_lines(rows, None, None))
    assert case_lines(rows, None)[0].endswith("triton 10.00 us (+25.0%)")


def test_peers_may_be_given_as_backends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    result = invoke("--filter", ONE, "--backend", "flashinfer_xqa", "--backend", "reference", "--adapter", "leaky_control", "--out", str(path))
    assert result.exit_code == 0, result.output
    found = {str(row["backend"]): row for row in rows_of(path) if row["repeat"] == 0 and row["mask_unowned_kv"] is not False}
    assert list(found) == ["reference", "flashinfer_xqa", "leaky_control"]
    assert found["flashinfer_xqa"]["time_us"] is None and found["flashinfer_xqa"]["note"] == "FlashInfer needs an NVIDIA GPU, the problem is on cpu"
    assert found["leaky_control"]["time_us"] is not None
    assert "adapter 'nobody' is unknown" in invoke("--backend", "nobody").stderr


def broken_in_preparing(problem: DecodeProblem) -> PeerCall:
    raise ValueError("no kernel for this\nand a long tail")


def broken_in_running(problem: DecodeProblem) -> PeerCall:
    def call() -> tuple[torch.Tensor, None]:
        raise RuntimeError

    return call


def of_another_shape(problem: DecodeProblem) -> PeerCall:
    return lambda: (torch.zeros(3), None)


def test_whatever_a_peer_raises_costs_only_its_cell() -> None:
    broken = {function.__name__: function for function in (broken_in_preparing, broken_in_running, of_another_shape)}
    report = run(adapters=broken | {"leaky_control": get_adapter("leaky_control")})
    notes = {row.backend: row.note for row in report.rows}
    assert notes["broken_in_preparing"] == "ValueError: no kernel for this"
    assert notes["broken_in_running"] == "RuntimeError: (no message)"
    assert (notes["of_another_shape"] or "").startswith("RuntimeError: shape")
    assert {row.backend for row in report.rows if row.time_us is not None} == {"reference", "leaky_control"}
    assert report.gate_failures == []


def test_a_peer_that_breaks_the_device_ends_the_run_with_its_case_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def breaks(problem: DecodeProblem) -> PeerCall:
        monkeypatch.setattr(peers, "_synchronize", lost)
        raise RuntimeError("launch failed")

    report = run(name_filter=TWO, adapters={"breaks": breaks, "leaky_control": get_adapter("leaky_control")})
    assert report.lost == "breaks broke the device: RuntimeError: launch failed"
    assert {row.case for row in report.rows} == {ONE} and report.num_left_out == 1
    assert all(row.time_us is None and row.note for row in report.rows)


def test_a_fault_of_ours_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("atoll.bench.decode.own_fault", breaks)
    with pytest.raises(RuntimeError) as caught:
        run()
    assert caught.value.__notes__ == [f"while {ONE} was measured; the cases before it are kept"]


def test_what_cannot_be_built_is_not_tried_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [shape for shape in full_shapes() if shape.name.startswith(("35b-tp1/bf16/p64/q1/1x", "35b-tp1/bf16/p16/q1/4x"))]
    refused = compile_peers(["flashinfer_xqa", "leaky_control"], shapes, CPU, jobs=1)
    # One build for each kind of kernel, whatever the batch and the context.
    assert set(refused) == {peer_key("flashinfer_xqa", shapes[0]), peer_key("flashinfer_xqa", shapes[-1])}
    assert set(refused.values()) == {"FlashInfer needs an NVIDIA GPU, the problem is on cpu"}
    monkeypatch.setattr("atoll.bench.decode._compile", lambda shapes, options: {peer_key("leaky_control", shapes[0]): "no compiler"})
    [row] = [row for row in run(adapters={"leaky_control": get_adapter("leaky_control")}).rows if row.backend == "leaky_control"]
    assert (row.time_us, row.note) == (None, "no compiler")


def test_what_a_compiler_said_is_told_and_a_refusal_only_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(problem: DecodeProblem) -> PeerCall:
        raise RuntimeError("Ninja build failed.\nmha.cu(1): error: no such type")

    monkeypatch.setattr(peers, "get_adapter", lambda name: fails)
    assert set(compile_peers(["peer"], [full_shapes()[0]], CPU, jobs=1).values()) == {"RuntimeError: Ninja build failed."}
    assert "mha.cu(1): error: no such type" in caplog.text
    monkeypatch.setattr(peers, "get_adapter", get_adapter)
    caplog.clear()
    assert compile_peers(["flashinfer_xqa"], [full_shapes()[0]], CPU, jobs=1) and not caplog.text


def test_a_cold_peer_reads_other_tables_in_each_call_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = DecodeShape(ModelHeads("tiny", 2, 4, 32), "bf16", 16, 1, 2, 512)
    work = BenchPool([shape], CPU, l2_bytes=1 << 18).workload(shape, cold=True)
    copies = work.tables.shape[0]
    assert copies > 2
    tables = list[torch.Tensor]()

    def adapter(problem: DecodeProblem) -> PeerCall:
        tables.append(problem.page_table)
        return lambda: (torch.zeros_like(problem.q), None)

    calls, _ = peer_calls(adapter, work)
    assert len(calls) == copies and torch.equal(torch.stack(tables), work.tables)
    assert torch.equal(decode_problem(work, 1).safe_page_table(), work.tables[1])
    # Each preparation holds a GB more than the last.
    held = iter(range(0, 1 << 40, 1 << 30))
    monkeypatch.setattr(peers, "_allocated_bytes", lambda device: next(held))
    monkeypatch.setattr(peers, "MAX_PREPARED_BYTES", (copies << 30) - 1)
    with pytest.raises(BackendError, match=rf"prepared for one of {copies} tables it holds 1074 MB, so that it is timed with a warm L2 alone"):
        peer_calls(adapter, work)


@pytest.mark.gpu
def test_everything_is_timed_warm_and_cold_on_a_gpu(device: torch.device) -> None:
    sketch = "atoll.bench.sketch:sketch"
    options = {"beside": ("triton",), "adapters": {sketch: get_adapter(sketch)}, "l2": ("warm", "cold"), "device": device, "jobs": 2}
    report = run(name_filter="35b-tp1/bf16/p16/q1/16x1024", **options)
    assert report.gate_failures == [] and report.lost is None
    assert all(row.time_us is not None for row in report.rows), [row.note for row in report.rows]
    assert {(row.backend, row.l2) for row in report.rows} >= {(name, l2) for name in ("triton", sketch) for l2 in ("warm", "cold")}


@pytest.mark.gpu
def test_a_peer_that_waits_for_the_device_costs_only_its_cell(device: torch.device) -> None:
    def waits(problem: DecodeProblem) -> PeerCall:
        def call() -> tuple[torch.Tensor, None]:
            torch.cuda.synchronize()
            return problem.q, None

        return call

    # Built where its name can be found, so here it is tried case by case.
    work = BenchPool([full_shapes()[0]], device).workload(full_shapes()[0])
    with pytest.raises(BackendError, match="captur"):
        peer_calls(waits, work)
    torch.cuda.synchronize()
    calls, _ = peer_calls(get_adapter("atoll.bench.sketch:sketch"), work)
    assert len(calls) == 1


def test_all_shapes_fit_beside_their_peers() -> None:
    l2_bytes = 60 << 20  # more than an H200 has
    # The largest holds 256 x 16384 tokens in bf16, 8.6 GB; the smallest are read from some hundred tables in turn.
    assert 256 * 16384 * 2048 <= pool_bytes(full_shapes(), l2_bytes) < 10e9
    assert 100 < max(cold_copies(shape, l2_bytes) for shape in full_shapes()) < 1000


def test_no_such_run_is_no_error_and_no_case_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no case of --shapes quick contains 'p32'"):
        run(name_filter="p32")
    assert run(measured=frozenset({(ONE, None)})).rows == []
