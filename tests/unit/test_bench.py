"""The decode benchmark on a CPU: its pool and gate (each fault seen caught), the rows it writes, the summary it draws. No time is asserted."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from atoll.bench import gate, timing
from atoll.bench.compile import Variant, compile_variants
from atoll.bench.decode import DecodeBenchOptions, DecodeReport, run_decode
from atoll.bench.gate import leaks, relative_error
from atoll.bench.peers import decode_problem
from atoll.bench.report import case_lines, compare, summary_lines, variant_key
from atoll.bench.rows import DecodeRow, Environment, append_jsonl, check_writable, environment
from atoll.bench.shapes import DecodeShape, ModelHeads
from atoll.bench.sketch import sketch
from atoll.bench.workload import COLD_L2_MULTIPLE, BenchPool, poison_rows, restore_rows, unowned_rows
from atoll.errors import BackendError, ConfigError
from atoll.ops.attention import DecodeConfig, decode_attention, plan_decode
from atoll.ops.attention.costs import kv_row_bytes
from atoll.ops.quant.formats import KVFormat
from atoll.probe import DecodeProblem

CPU = torch.device("cpu")
FORMATS: tuple[KVFormat, ...] = ("bf16", "fp8_tensor", "fp8_token")


def tiny(kv_format: KVFormat = "bf16", page_size: int = 16, batch: int = 3, ctx: int = 512) -> DecodeShape:
    return DecodeShape(ModelHeads("tiny", 2, 4, 32), kv_format, page_size, 1, batch, ctx)


def row(case: str, time_us: float | None, *, mask: bool | None = True, repeat: int = 0, backend: str = "triton", num_bytes: int = 1000) -> DecodeRow:
    return DecodeRow(case, 1, 1024, backend, mask, repeat, "warm", num_bytes, 10, time_us)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pages_are_scattered_and_named_once(kv_format: KVFormat) -> None:
    shape = tiny(kv_format)
    work = BenchPool([shape], CPU).workload(shape)
    used = torch.cat([work.tables[0, i, : -(-n // 16)] for i, n in enumerate(work.lengths)])
    assert used.min() >= 1
    assert used.max() < work.kv.num_pages
    assert used.unique().numel() == used.numel()
    assert (used[1:] != used[:-1] + 1).any()
    assert all((work.tables[0, i, -(-n // 16) :] == 0).all() for i, n in enumerate(work.lengths))


def test_pages_in_order_are_neighbours_and_named_once() -> None:
    shape = tiny()
    work = BenchPool([shape], CPU, page_order="in_order").workload(shape)
    used = [work.tables[0, i, : -(-n // 16)] for i, n in enumerate(work.lengths)]
    assert all((pages[1:] == pages[:-1] + 1).all() for pages in used)
    assert torch.cat(used).unique().numel() == sum(pages.numel() for pages in used)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_are_finite_and_not_constant(kv_format: KVFormat) -> None:
    shape = tiny(kv_format)
    kv = BenchPool([shape], CPU).workload(shape).kv
    for field in (kv.k, kv.v):
        values = field.float()
        assert values.isfinite().all()
        assert values.std() > 0.5
    if kv.k_scale is not None:
        assert (kv.k_scale > 0).all()


def test_a_cold_run_reads_enough_other_rows_between_two_reads_of_one() -> None:
    shape, l2_bytes = tiny(), 1 << 20
    pool = BenchPool([shape], CPU, l2_bytes=l2_bytes)
    cold, warm = pool.workload(shape, cold=True), pool.workload(shape)
    assert warm.tables.shape[0] == 1
    assert cold.tables.shape[0] * sum(cold.lengths) * kv_row_bytes(shape.spec()) >= COLD_L2_MULTIPLE * l2_bytes
    used = cold.tables[cold.tables > 0]
    assert used.unique().numel() == used.numel()


def test_pool_refills_for_another_layout_only() -> None:
    shapes = [tiny("bf16"), tiny("bf16", batch=2), tiny("fp8_tensor")]
    pool = BenchPool(shapes, CPU)
    first = pool.workload(shapes[0]).kv
    assert pool.workload(shapes[1]).kv is first
    assert pool.workload(shapes[2]).kv.kv_format == "fp8_tensor"


@pytest.mark.parametrize("kv_format", FORMATS)
def test_poison_reaches_unowned_rows_only_and_is_taken_back(kv_format: KVFormat) -> None:
    shape = tiny(kv_format)
    pool = BenchPool([shape], CPU)
    work = pool.workload(shape)
    before = pool.buffer.clone()
    pages, rows = unowned_rows(work)
    saved = poison_rows(work.kv, pages, rows)
    assert work.kv.v[0].float().isnan().all()
    for i, n in enumerate(work.lengths):
        last = work.kv.v[work.tables[0, i, (n - 1) // 16].long()].float()
        owned = n - (n - 1) // 16 * 16
        assert last[:, :owned].isfinite().all()
        assert last[:, owned:].isnan().all()
    restore_rows(saved, pages)
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_gate_passes_what_is_right(kv_format: KVFormat) -> None:
    shape = tiny(kv_format)
    work = BenchPool([shape], CPU).workload(shape)
    plan = plan_decode(shape.spec(), work.lengths, work.tables[0])
    out, _ = decode_attention(work.q, work.kv, plan)
    assert relative_error(work, out) < 0.01
    assert not leaks(work, plan)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_gate_sees_an_unmasked_kernel_leak(kv_format: KVFormat) -> None:
    shape = tiny(kv_format)
    work = BenchPool([shape], CPU).workload(shape)
    assert leaks(work, plan_decode(shape.spec(mask_unowned_kv=False), work.lengths, work.tables[0]))


def test_gate_sees_wrong_pages_and_nan() -> None:
    shape = tiny()
    work = BenchPool([shape], CPU).workload(shape)
    swapped = work.tables[0].clone()
    swapped[:, :2] = swapped[:, [1, 2]]
    out, _ = decode_attention(work.q, work.kv, plan_decode(shape.spec(), work.lengths, swapped))
    assert relative_error(work, out) > 0.01
    assert not relative_error(work, torch.full_like(out, torch.nan)) <= 0.01


def test_problem_for_adapters_is_the_same_call() -> None:
    shape = tiny()
    work = BenchPool([shape], CPU).workload(shape)
    problem = decode_problem(work)
    assert torch.equal(problem.safe_page_table(), work.tables[0])
    assert problem.seq_lens.tolist() == work.lengths
    assert problem.kv is work.kv


def test_graph_holds_whole_cycles_over_the_copies() -> None:
    calls: list[timing.Call] = [lambda: 0, lambda: 1, lambda: 2]
    repeated = timing.repeat_calls(calls, call_us=7.0)
    assert len(repeated) == 21
    assert repeated[:6] == calls * 2
    assert len(timing.repeat_calls(calls[:1], call_us=2000.0)) == 4


def test_variants_are_interleaved_and_their_order_rotates() -> None:
    order: list[str] = []
    variants: dict[str, list[timing.Call]] = {name: [lambda name=name: order.append(name)] for name in "abc"}  # type: ignore[misc]
    found = timing.time_interleaved(variants, CPU, rounds=3)
    assert order == [*"abc", *"abc", *"bca", *"cab"]
    assert set(found) == set("abc")


def run(*, adapters: dict[str, Callable[[DecodeProblem], Callable[[], tuple[torch.Tensor, None]]]] | None = None) -> DecodeReport:
    options = DecodeBenchOptions(name_filter="35b-tp1/bf16/p64/q1/1x1024", rounds=1, device=CPU, adapters=adapters or {})
    return run_decode(options)


def test_run_on_a_cpu_gives_a_row_per_variant() -> None:
    report = run()
    assert [variant_key(r) for r in report.rows] == [("reference", True, 0), ("reference", True, 1), ("reference", False, 0)]
    assert all(r.time_us is not None and r.rel_error is not None for r in report.rows)
    assert report.gate_failures == []
    # Not measured on a CPU, so null.
    assert {(r.l2, r.roof_gbps) for r in report.rows} == {(None, None)}


def test_the_sketch_says_what_it_leaves_out() -> None:
    shape = tiny()
    problem = decode_problem(BenchPool([shape], CPU).workload(shape))
    with pytest.raises(BackendError, match="device cpu is not a GPU"):
        sketch(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor"])
@pytest.mark.parametrize(("batch", "ctx"), [(1, 300), (40, 4096)])
def test_the_sketch_is_right(kv_format: KVFormat, batch: int, ctx: int) -> None:
    device = torch.device("cuda")
    shape = DecodeShape(ModelHeads("35b-tp1", 2, 8, 256), kv_format, 16, 1, batch, ctx)
    work = BenchPool([shape], device).workload(shape)
    out, _ = sketch(decode_problem(work))()
    assert relative_error(work, out.view_as(work.q)) < 0.01


def test_adapter_that_refuses_or_is_wrong_has_a_note_and_no_time() -> None:
    def refuses(problem: DecodeProblem) -> Callable[[], tuple[torch.Tensor, None]]:
        raise BackendError("page_size 64 is not taken; use 16")

    def wrong(problem: DecodeProblem) -> Callable[[], tuple[torch.Tensor, None]]:
        return lambda: (torch.zeros_like(problem.q), None)

    report = run(adapters={"refuses": refuses, "wrong": wrong})
    by_name = {r.backend: r for r in report.rows}
    assert by_name["refuses"].time_us is None
    assert by_name["refuses"].note == "page_size 64 is not taken; use 16"
    assert by_name["wrong"].time_us is None
    assert len(report.gate_failures) == 1
    assert "wrong" in report.gate_failures[0]
    assert by_name["reference"].time_us is not None


def test_kernel_that_leaks_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "leaks", lambda work, plan: True)
    report = run()
    assert [r.time_us is None for r in report.rows] == [True, True, False]
    assert len(report.gate_failures) == 1


def test_time_budget_leaves_cases_out() -> None:
    report = run_decode(DecodeBenchOptions(name_filter="1x1024", device=CPU, rounds=1, budget_s=0.0))
    assert report.rows == []
    assert report.num_left_out == 4


def test_interrupt_keeps_what_was_measured() -> None:
    def stop(rows: list[DecodeRow]) -> None:
        raise KeyboardInterrupt

    report = run_decode(DecodeBenchOptions(name_filter="bf16/p16/q1/1x", device=CPU, rounds=1), on_case=stop)
    assert {r.case for r in report.rows} == {"35b-tp1/bf16/p16/q1/1x1024"}
    assert report.interrupted
    assert report.num_left_out == 2


def test_no_case_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no case of --shapes quick contains 'p32'"):
        run_decode(DecodeBenchOptions(name_filter="p32", device=CPU))


@pytest.mark.gpu
def test_run_on_a_gpu_tells_warm_from_cold(device: torch.device) -> None:
    report = run_decode(DecodeBenchOptions(name_filter="35b-tp1/bf16/p16/q1/16x1024", l2=("warm", "cold"), device=device, jobs=1))
    assert report.gate_failures == []
    assert [r.l2 for r in report.rows] == ["warm"] * 3 + ["cold"] * 3
    assert all(r.time_us is not None for r in report.rows)
    assert report.read_gbps is not None
    assert max(r.roof_gbps or 0 for r in report.rows) == report.roof_gbps


@pytest.mark.gpu
def test_a_tuning_that_does_not_fit_the_device_is_told(device: torch.device) -> None:
    shape = DecodeShape(ModelHeads("tiny", 1, 4, 256), "bf16", 64, 1, 1, 4096)
    fitting, oversized = (Variant(shape, True, DecodeConfig(tile=tile, num_splits=2, num_stages=stages)) for tile, stages in ((32, 2), (256, 8)))
    refused = compile_variants([fitting, oversized], jobs=1)
    assert list(refused) == [oversized]
    assert refused[oversized]


def test_rows_are_json_lines_with_their_environment(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.jsonl"
    env = Environment("NVIDIA H200", "0123abc", "2.11.0", "3.6.0")
    append_jsonl(path, [asdict(row("a", 7.5)) | asdict(env)])
    append_jsonl(path, [asdict(row("b", None)) | asdict(env)])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    for key in ("case", "backend", "mask_unowned_kv", "l2", "time_us", "bytes", "roof_gbps", "device", "commit", "torch", "triton"):
        assert key in first
    assert (first["time_us"], first["commit"]) == (7.5, "0123abc")
    assert second["time_us"] is None


def test_folder_as_output_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        check_writable(tmp_path)


def test_environment_names_device_and_versions() -> None:
    env = environment(CPU, commit="abc")
    assert env.device.startswith("cpu")
    assert (env.commit, env.torch, env.device_id) == ("abc", torch.__version__, None)


def test_comparison_of_masked_with_unmasked() -> None:
    rows = [row("a", 10.0), row("a", 10.0, mask=False), row("b", 12.0), row("b", 10.0, mask=False), row("c", 9.0), row("d", None), row("d", 1.0, mask=False)]
    found = compare(rows, ("triton", True, 0), ("triton", False, 0))
    assert found.ratios == {"a warm": 1.0, "b warm": 1.2}
    assert found.worst == ("b warm", 1.2)
    assert found.geomean == pytest.approx(1.2**0.5)
    assert found.num_above(0.03) == 1


def test_summary_tells_geomean_worst_count_and_noise() -> None:
    rows = [row("a", 10.0), row("a", 10.1, repeat=1), row("a", 10.0, mask=False), row("a", 20.0, mask=None, backend="peer")]
    text = "\n".join(summary_lines(rows, 4360.0, 4590.0))
    assert "roof 4.59 TB/s (a plain reduction read 4.36 TB/s)" in text
    assert "masked against unmasked: geomean +0.00%, worst +0.0% (a warm), 0 of 1 above +3%" in text
    assert "masked again against masked (noise): geomean +1.00%" in text
    assert "masked against peer: geomean -50.00%" in text


def test_case_line_tells_time_rate_and_the_others() -> None:
    rows = [row("a", 2.0, num_bytes=8_000_000), row("a", 1.0, mask=False), row("a", None, mask=None, backend="peer")]
    rows[2].note = "not for this GPU"
    [line] = case_lines(rows, 5000.0)
    assert "2.00 us  4.00 TB/s  80%" in line
    assert "unmasked 1.00 us (-50.0%)" in line
    assert line.endswith("peer not measured: not for this GPU")


def test_roof_is_the_best_of_reduction_and_large_kernels() -> None:
    large = row("a", 1000.0, num_bytes=4_600_000_000)
    cached = row("b", 1.0, num_bytes=10_000_000)
    assert DecodeReport([large, cached], read_gbps=4360.0).roof_gbps == pytest.approx(4600.0)
    assert DecodeReport([cached], read_gbps=4360.0).roof_gbps == pytest.approx(4360.0)
    assert DecodeReport([cached], read_gbps=None).roof_gbps is None
