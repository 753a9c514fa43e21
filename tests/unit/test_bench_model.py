"""The model benchmark: the shape is the published one, the step is a real one over finite pools, what does not fit says so, and kernels are added up."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from typer.testing import CliRunner, Result

from atoll.bench import model as bench
from atoll.bench.kernel_times import KernelTime, merge_variants, profile_kernels, short_name
from atoll.bench.model import ModelBenchOptions, ModelRow, make_step, row_lines, run_model
from atoll.cli import app
from atoll.engine.build import make_slot_layout
from atoll.errors import BackendError, ConfigError
from atoll.kv.layout import PageLayout
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool
from atoll.models.model_config import config_from_hf
from atoll.models.random_model import SHAPES, RandomWeights, make_model
from atoll.ops.quant.formats import KV_FORMATS, KVFormat

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "model", "--device", "cpu", *arguments])


def test_the_published_shape_has_its_35_billion_weights() -> None:
    shape = SHAPES["qwen3.5-35b-a3b"]
    # The sizes that transformers' config class assumes are this model's.
    assumed = config_from_hf(Qwen3_5MoeTextConfig(max_position_embeddings=262144, rope_theta=1e7).to_dict() | {"rope_theta": 1e7, "rope_parameters": None})
    assert {key: value for key, value in vars(assumed).items() if key not in ("rope_theta", "rope_scaling")} == {
        key: value for key, value in vars(shape).items() if key not in ("rope_theta", "rope_scaling")
    }
    assert RandomWeights(shape, CPU).num_elements() == 34_660_610_688


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_the_command_writes_a_row_for_each_case(kv_format: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ("--batch", "1,3", "--context", "40", "--replays", "2", "--page-size", "8", "--out", str(path), "--commit", "abc")
    result = invoke("--shape", "tiny", "--kv-format", kv_format, *arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["batch"], row["context"], row["kv_format"], row["page_size"]) for row in rows] == [(1, 40, kv_format, 8), (3, 40, kv_format, 8)]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_us"] * 1e6)
        assert (row["shape"], row["commit"], row["replays"], row["graph"], row["device_us"], row["kernels"]) == ("tiny", "abc", 2, False, None, None)
        assert row["device"].startswith("cpu") and row["torch"] == torch.__version__ and row["triton"]
        assert row["attention_backend"] == "reference" and row["speedup"] is None
    assert f"tiny {kv_format} batch   3 context     40, reference:" in result.stdout and "tokens/s" in result.stdout


def test_backends_take_turns_in_each_case_and_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    backends = ("--attention-backend", "reference", "--backend", "leaky")
    arguments = ("--batch", "2", "--context", "10,40", "--kv-format", "bf16,fp8_tensor", "--replays", "3", "--out", str(path))
    result = invoke("--shape", "tiny", *backends, *arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [(kv_format, context) for kv_format in ("bf16", "fp8_tensor") for context in (10, 40)]
    assert [(row["kv_format"], row["context"], row["attention_backend"]) for row in rows] == [(*case, b) for case in cases for b in ("reference", "leaky")]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["speedup"] is None
        assert second["speedup"] == pytest.approx(second["tokens_per_s"] / first["tokens_per_s"])
    assert result.stdout.count(" times the first") == 4


def test_samples_of_several_are_taken_in_turns() -> None:
    order: list[str] = []
    samples = [lambda name=name: float(len(order.append(name) or order)) for name in "ab"]  # type: ignore[misc,func-returns-value]
    assert bench._in_turns(samples, 3) == [[1.0, 4.0, 5.0], [2.0, 3.0, 6.0]]
    assert order == [*"ab", *"ba", *"ab"]
    assert bench._in_turns([], 3) == []


def test_a_backend_that_refuses_is_told_before_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "make_model", lambda *arguments: pytest.fail("weights were made"))
    with pytest.raises(BackendError, match="gluon_sm90: device cpu is not an NVIDIA GPU"):
        run_model(ModelBenchOptions("tiny", (1,), attention_backends=("reference", "gluon_sm90")))


def test_rows_of_earlier_versions_are_read() -> None:
    path = Path(__file__).resolve().parents[2] / "bench" / "results" / "model-h200.jsonl"
    known = {one.name for one in fields(ModelRow)}
    for line in path.read_text().splitlines():
        row = ModelRow(**{key: value for key, value in json.loads(line).items() if key in known})
        assert row.tokens_per_s is not None or row.note


def test_a_profile_adds_up_to_the_whole() -> None:
    [row] = run_model(ModelBenchOptions("tiny", (2,), (20,), replays=1, profile=True, dtype=torch.float32))
    assert row.kernels is not None and sum(time.share for time in row.kernels) == pytest.approx(1.0)
    # Two grouped products in each of four layers.
    [grouped] = [time for time in row.kernels if time.name == "aten::_grouped_mm"]
    assert grouped.calls == 8.0
    shares = [float(line.split("%")[0]) for line in row_lines(row)[1:]]
    assert sum(shares) == pytest.approx(100.0, abs=1.0)


def test_a_step_names_pages_of_its_own_and_the_last_token() -> None:
    layout = PageLayout(1, 2, 64, 16, "bf16")
    step = make_step(TINY, layout, 5, 33)
    pages = [page for row in step.decodes for page in row.pages]
    assert sorted(pages) == list(range(1, 16)) and pages != sorted(pages)
    assert [row.start for row in step.decodes] == [32] * 5
    assert [row.state_slot for row in step.decodes] == [0, 1, 2, 3, 4]
    assert len({row.token_ids[0] for row in step.decodes}) > 1


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pools_are_finite_and_not_zero(kv_format: KVFormat) -> None:
    slot_layout = make_slot_layout(TINY, torch.bfloat16)
    assert slot_layout is not None
    pool, slots = PagePool(PageLayout(1, 2, 64, 16, kv_format), 600, CPU, "nan"), SlotPool(slot_layout, 3, CPU, "nan")
    bench.fill_pools(pool, slots, seed=0)
    for field in (*pool.layout.fields(pool.buffer), *slot_layout.fields(slots.buffer)):
        values = field.float()
        assert values.isfinite().all() and (values.abs() > 0).float().mean() > 0.9


def test_tokens_go_to_different_experts() -> None:
    weights = RandomWeights(TINY, CPU)
    model = make_model(TINY, weights, CPU, torch.float32)
    mixture = model.layers[0].mlp  # type: ignore[union-attr]
    _, experts = mixture._route(torch.randn(64, TINY.hidden_size, generator=torch.Generator().manual_seed(0)))
    assert experts.unique().numel() == 8


def test_a_case_that_does_not_fit_is_a_row_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_free_bytes", lambda device: 4 << 30)
    rows = run_model(ModelBenchOptions("tiny", (1, 2000), (4096,), replays=1, dtype=torch.float32))
    assert rows[0].step_us is not None and rows[1].step_us is None and rows[1].tokens_per_s is None
    assert rows[1].note is not None and rows[1].note.endswith("GB beside the weights, 4.3 are free")
    assert row_lines(rows[1]) == [f"tiny bf16 batch 2000 context   4096, auto: {rows[1].note}"]
    monkeypatch.setattr(bench, "_free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"tiny has 0\.0 GB of weights, 0\.0 GB are free on cpu; use the shape 'tiny'"):
        run_model(ModelBenchOptions("tiny", (1,)))


def test_a_case_that_runs_out_of_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = bench._measure

    def measure_small(rows: list[ModelRow], *others: Any) -> None:
        if rows[0].batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        measure(rows, *others)

    monkeypatch.setattr(bench, "_measure", measure_small)
    rows = run_model(ModelBenchOptions("tiny", (2, 1), (10,), replays=1, dtype=torch.float32))
    assert rows[0].note == "ran out of memory: CUDA out of memory. Tried" and rows[0].step_us is None
    assert rows[1].note is None and rows[1].step_us is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelBenchOptions("7b"), r"shape '7b' is unknown; use one of qwen3\.5-35b-a3b, tiny"),
        (ModelBenchOptions("tiny", contexts=(1,)), r"context 1 is outside 2 to 4096, the positions of tiny"),
        (ModelBenchOptions("tiny", contexts=(5000,)), r"context 5000 is outside 2 to 4096"),
        (ModelBenchOptions("tiny", replays=0), r"replays 0 is below 1"),
    ],
)
def test_options_out_of_range(options: ModelBenchOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_model(options)


def test_the_large_shape_is_refused_on_a_cpu() -> None:
    result = invoke()
    assert result.exit_code == 2 and "needs a GPU for the shape 'qwen3.5-35b-a3b', this is cpu; pass --shape tiny" in result.stderr
    assert "--batch '1,x' is not a list of positive numbers" in invoke("--shape", "tiny", "--batch", "1,x").stderr


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, x>(int, T3)", "at::native::vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<bool, 1>(int)", "at::native::anonymous::CatArrayBatchedCopy"),
        ("step_delta_kernel", "step_delta_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("_ZN7cutlass13device_kernelIN2at4cuda17GroupProblemShapeEEEvT_", "cutlass::device_kernel (grouped)"),
        ("_ZN2at4cuda3fooIiEEvT_", "at::cuda::foo"),
        ("<odd>", "<odd>"),
    ],
)
def test_kernel_names_are_cut(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


def test_variants_of_a_kernel_are_added_up() -> None:
    times = [KernelTime("void f<1>(int)", 2.0, 3.0, 0.3), KernelTime("g", 1.0, 4.0, 0.4), KernelTime("void f<2>(int)", 1.0, 3.0, 0.3)]
    assert merge_variants(times) == [KernelTime("f", 3.0, 6.0, 0.6), KernelTime("g", 1.0, 4.0, 0.4)]


def test_a_row_without_a_time_has_no_rate() -> None:
    assert ModelRow("tiny", 4, 10, "bf16", 16, "bfloat16").tokens_per_s is None
    assert ModelRow("tiny", 4, 10, "bf16", 16, "bfloat16", step_us=1000.0).tokens_per_s == 4000.0


@pytest.mark.gpu
def test_a_gpu_replays_a_graph_whose_kernels_are_seen(device: torch.device) -> None:
    [row] = run_model(ModelBenchOptions("tiny", (3,), (200,), replays=3, profile=True, device=device))
    assert row.graph and row.device_us is not None and row.step_us is not None
    assert row.kernels is not None and {"step_conv_kernel", "step_delta_kernel"} <= {time.name for time in row.kernels}


@pytest.mark.gpu
def test_kernels_of_a_graph_are_counted_per_call(device: torch.device) -> None:
    x = torch.zeros(1000, device=device)
    times = profile_kernels(lambda: x.add_(1).mul_(2), device)
    assert sum(time.calls for time in times) == 2.0
