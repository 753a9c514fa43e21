"""How close decode answers are: within twice the error of the plain computation in the input dtype, at every hostile length."""

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from atoll.ops.attention import DecodeConfig, DecodePlan, DecodeSpec, gluon_decode_sm90, merge_states, plan_decode
from atoll.probe import BackendAdapter, Case, CaseReport, probe_case
from atoll.probe.cases import DecodeProblem, hostile_lengths, row_values, set_rows, spike_keys, with_flags
from atoll.probe.interpreter import interpreted as in_the_interpreter
from atoll.probe.kernels import changed_rows, poison_everything
from atoll.probe.matrix import matrix
from atoll.probe.oracle import compare, exact_attention, low_precision_attention
from tests.kit.batches import answer, rows_changed_alone
from tests.kit.build import combine, recorded_launches
from tests.kit.hopper import best_backend
from tests.kit.workers import WorkerPool, probe_interpreted

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.gpu)]
LONG = [replace(case, seq_lens=(*hostile_lengths(case.spec.page_size), 4096)) for case in matrix("quick")[::8]]


def spec(kv_format: str = "bf16", **options: object) -> DecodeSpec:
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16} | options
    return DecodeSpec(kv_format=kv_format, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_error_is_within_the_bound(case: Case, backend: str, device: torch.device) -> None:
    problem = case.make(device)
    assert compare(problem, *answer(backend, problem)).within


HOPPER = [
    replace(case, seq_lens=(*hostile_lengths(case.spec.page_size), 4096, 8192))
    for case in [case for case in matrix("full") if gluon_decode_sm90.refusal(case.spec) is None and case.layout != "odd"][::7]
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.name)
def test_error_of_the_hopper_kernel_is_within_the_bound(case: Case, device: torch.device) -> None:
    problem = case.make(device)
    assert compare(problem, *answer(best_backend(), problem)).within


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [DecodeConfig(64, 1), DecodeConfig(64, 7, num_stages=6), DecodeConfig(128, 2, num_warps=8), DecodeConfig(64, 9, tiles_per_split=8)]
)
def test_error_of_the_hopper_kernel_is_within_the_bound_for_every_tuning(config: DecodeConfig, device: torch.device) -> None:
    problem = Case(spec("fp8_tensor", head_dim=256, page_size=64), (*hostile_lengths(64), 4096)).make(device)
    assert compare(problem, *answer(best_backend(), problem, config)).within


INTERPRETED = [
    (Case(spec(soft_cap=30.0, sinks=True, num_kv_heads=1), (0, 1, 17, 255)), DecodeConfig(tile=64)),
    (Case(spec("fp16", q_dtype=torch.float16, query_len=2, window=100, num_kv_heads=1), (1, 130, 257)), DecodeConfig(tile=32, num_splits=4)),
    (Case(spec("fp8_tensor", v_layout="transposed", page_size=64, num_kv_heads=1), (63, 64, 260)), DecodeConfig(tile=64, num_splits=2)),
    (Case(spec("fp8_token", query_len=4, num_kv_heads=1), (3, 129)), DecodeConfig(tile=32, num_splits=5, tiles_per_split=1)),
]


@pytest.fixture(scope="module")
def interpreted(interpreter: WorkerPool) -> dict[str, Future[CaseReport]]:
    return {case.name: interpreter.submit(probe_interpreted, case, config, ()) for case, config in INTERPRETED}


@pytest.mark.parametrize("name", [case.name for case, _ in INTERPRETED])
def test_error_of_the_interpreted_kernel_is_within_the_bound(name: str, interpreted: dict[str, Future[CaseReport]]) -> None:
    report = interpreted[name].result()
    assert report.error is not None
    assert report.error.within, report


@pytest.mark.parametrize("key", ["first", "last", "page edge", "tile edge"])
def test_one_missing_key_is_outside_the_bound(key: str) -> None:
    """The negative control of the bound: a spike stands at each of these keys, so that leaving one out shows at any length."""
    problem = Case(spec(num_q_heads=8, num_kv_heads=1), (1000,)).make()
    clean = answer("reference", problem)
    keys = spike_keys(problem.spec, 1000)
    chosen = {"first": keys[0], "last": keys[-1], "page edge": 16, "tile edge": 448}[key]
    assert chosen in keys
    row = problem.row_ids(0)[[chosen]]
    for field in (problem.kv.k, problem.kv.v):
        set_rows(field, row, 16, torch.zeros_like(row_values(field, row, 16)))
    assert not compare(problem, *clean).within


def test_a_nan_answer_is_outside_the_bound() -> None:
    problem = Case(spec(), (5, 40)).make()
    out, lse = answer("reference", problem)
    out[1, 0, 2, 3] = torch.nan
    assert not compare(problem, out, lse).within


def test_the_bound_itself_is_tight() -> None:
    """The plain computation in bf16 is about 1 % off: the bound allows no more than twice that, so that a factor of 1.05 is found."""
    problem = Case(spec(), (1000, 257)).make()
    exact, lse = exact_attention(problem)
    low, _ = low_precision_attention(problem)
    assert 0 < (low - exact).abs().max() < 0.05 * exact.abs().max()
    assert compare(problem, exact, lse).ratio == 0.0
    assert not compare(problem, exact * 1.05, lse).within


CROWD = Case(spec(batch_invariant=True, query_len=2), hostile_lengths(16), max_seq_len=4096)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_token"])
def test_batch_invariant_gives_a_sequence_the_same_bits_alone(kv_format: str, backend: str, device: torch.device) -> None:
    assert rows_changed_alone(backend, with_flags(CROWD, kv_format=kv_format), device=device) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["fp8_tensor", "fp8_token"])
def test_batch_invariant_holds_for_the_hopper_kernel(kv_format: str, device: torch.device) -> None:
    crowd = Case(spec(batch_invariant=True, kv_format=kv_format), (*hostile_lengths(16), 3000), max_seq_len=4096)
    if gluon_decode_sm90.refusal(crowd.spec) is None:
        assert rows_changed_alone(best_backend(), crowd, device=device) == 0


def test_batch_invariant_holds_in_the_interpreter(interpreter: WorkerPool) -> None:
    few = replace(with_flags(CROWD, head_dim=32), seq_lens=(1, 17, 70))
    same = interpreter.submit(rows_changed_alone, "triton", few, DecodeConfig(tile=16, num_splits=8, tiles_per_split=2))
    assert same.result() == 0


def test_batch_invariant_with_the_backends_own_splits_in_the_interpreter(interpreter: WorkerPool) -> None:
    """The crowd's longest sequence needs a second split, the others alone do not; a sink would show the difference between one split and more."""
    crowd = Case(spec(batch_invariant=True, sinks=True, head_dim=32), (1, 17, 1100))
    assert interpreter.submit(rows_changed_alone, "triton", crowd).result() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_plan_gives_same_bits(backend: str, device: torch.device) -> None:
    problem = Case(spec("fp8_tensor", query_len=4), hostile_lengths(16)).make(device)
    run = BackendAdapter(backend)(problem)
    poison_everything(problem, run, "zero", seed=0)
    out, lse = run()
    assert lse is not None
    first = (out.clone(), lse.clone())
    assert not changed_rows(first, run()).any()


MERGED_LENS = (640, 1120, 0, 17)


def plan_of_splits(num_splits: int, batch_invariant: bool) -> DecodePlan:
    """A plan whose sequences, cut to what it has room for, have a split for each 16 tokens: random states, the same in every plan; all else is NaN."""
    merged = spec("fp32", q_dtype=torch.float32, num_q_heads=2, num_kv_heads=1, head_dim=128, batch_invariant=batch_invariant)
    lens = torch.tensor([min(n, 16 * num_splits) for n in MERGED_LENS], dtype=torch.int32)
    config = DecodeConfig(tile=16, num_splits=num_splits, tiles_per_split=1)
    plan = plan_decode(merged, lens, torch.zeros(len(lens), 70, dtype=torch.int32), backend="reference", config=config)
    plan.partial_o.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    rand = torch.Generator().manual_seed(0)
    for i_b, used in enumerate(splits_used(plan)):
        plan.partial_o[i_b, :, :used] = torch.randn(70, 2, 128, generator=rand)[:used]
        plan.partial_lse[i_b, :, :used] = 3 * torch.randn(70, 2, generator=rand)[:used]
        # So that the answer depends on the last as well.
        plan.partial_lse[i_b, :, used - 1] = 6.0
    return plan


def splits_used(plan: DecodePlan) -> list[int]:
    return [max(1, -(-n // 16)) for n in plan.seq_lens.tolist()]


def merge_splits(num_splits: int, batch_invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_of_splits(num_splits, batch_invariant)
    out, lse = torch.full((len(MERGED_LENS), 1, 2, 128), torch.nan), torch.full((len(MERGED_LENS), 1, 2), torch.nan)
    with in_the_interpreter([plan.seq_lens, plan.partial_o, plan.partial_lse, out, lse]):
        combine.combine(out, lse, plan, None)
    return out, lse


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_splits", [33, 40, 70])
def test_many_splits_are_merged(num_splits: int, batch_invariant: bool, interpreter: WorkerPool) -> None:
    out, lse = interpreter.submit(merge_splits, num_splits, batch_invariant).result()
    plan = plan_of_splits(num_splits, batch_invariant)
    for i_b, used in enumerate(splits_used(plan)):
        expected, expected_lse = merge_states(plan.partial_o[i_b, 0, :used], plan.partial_lse[i_b, 0, :used] * math.log(2))
        torch.testing.assert_close(out[i_b, 0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[i_b, 0], expected_lse, atol=1e-5, rtol=1e-5)
        if used > 1:
            one_less, _ = merge_states(plan.partial_o[i_b, 0, : used - 1], plan.partial_lse[i_b, 0, : used - 1] * math.log(2))
            assert not torch.allclose(expected, one_less, atol=1e-2)


def test_the_order_of_a_batch_invariant_merge_does_not_depend_on_the_plans_splits(interpreter: WorkerPool) -> None:
    fixed = [interpreter.submit(merge_splits, num_splits, True) for num_splits in (40, 70)]
    free = interpreter.submit(merge_splits, 40)
    few, many = (future.result() for future in fixed)
    # The second sequence has 40 splits in one plan and 70 in the other.
    assert changed_rows(few, many).any(-1).flatten().tolist() == [False, True, False, False]
    # Added 64 at a time, the same states have other bits.
    assert changed_rows(few, free.result())[0].any()
    for num_splits, batch_invariant, chunk in ((32, False, 32), (33, False, 64), (33, True, 32), (70, True, 32)):
        with recorded_launches((combine, "combine_kernel")) as launches:
            combine.combine(*few, plan_of_splits(num_splits, batch_invariant), None)
        assert [launch.arguments["CHUNK"] for launch in launches] == [chunk]


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_two_halves_merge_into_the_whole(backend: str, device: torch.device) -> None:
    problem = Case(spec(causal=False), (256,)).make(device)
    whole = answer(backend, problem)
    halves = []
    for lanes in (slice(0, 8), slice(8, 16)):
        half = replace(
            problem,
            seq_lens=torch.tensor([128], dtype=torch.int32),
            page_table=problem.page_table[:, lanes],
            pages=(problem.pages[0][lanes],),
        )
        halves.append(answer(backend, half))
    out, lse = merge_states(torch.stack([half[0] for half in halves]), torch.stack([half[1] for half in halves]))
    torch.testing.assert_close(out.float(), whole[0].float(), atol=0.03, rtol=0.02)
    torch.testing.assert_close(lse, whole[1], atol=1e-5, rtol=1e-5)


def test_a_report_of_a_wrong_answer_says_wrong() -> None:
    def twice_too_large(problem: DecodeProblem):  # type: ignore[no-untyped-def]
        run = BackendAdapter("reference")(problem)

        def call() -> tuple[torch.Tensor, None]:
            return run()[0] * 2, None

        return call

    assert probe_case(twice_too_large, Case(spec(), (3, 40)), fills=(), control=False).status == "wrong"
