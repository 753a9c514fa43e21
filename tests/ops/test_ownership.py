"""The promise: no bit of a decode answer depends on a row that its sequence does not own; and NaN in owned rows reaches exactly its readers."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from atoll.ops.attention import BatchShape, DecodeConfig, DecodeSpec, gluon_decode_sm90
from atoll.probe import FILLS, BackendAdapter, Case, CaseReport, get_adapter, probe_case
from atoll.probe.cases import DecodeProblem, as_bits, hostile_lengths, row_values
from atoll.probe.kernels import poison_everything
from atoll.probe.layouts import LAYOUTS
from atoll.probe.matrix import FORMATS, GROUPS, HEAD_DIMS, PAGES, QUERY_LENS, RARE_FORMATS, RARE_PAGES, matrix
from atoll.probe.parallel import probe_by_name, process_pool
from atoll.probe.poison import parts_of
from tests.kit.hopper import best_backend, is_hopper
from tests.kit.workers import WorkerPool, probe_interpreted, rows_changed_by_flag

QUICK = matrix("quick", short=True)
# Rows that lie on no multiple of 16 bytes go to the Triton kernel (tests/ops/test_gluon_sm90.py).
HOPPER = [case for case in matrix("full") if gluon_decode_sm90.refusal(case.spec) is None and case.layout != "odd"]

# Fills for the interpreter, where each run costs a second: NaN of every kind, Inf, and finite rows as an earlier request leaves them.
FEW_FILLS = ("nan", "inf", "stale")
ONE_SPLIT = DecodeConfig(tile=32, num_splits=1)
THREE_SPLITS = DecodeConfig(tile=16, num_splits=3)
FIXED_SPLITS = DecodeConfig(tile=16, num_splits=5, tiles_per_split=2)


def small_spec(kv_format: str, page_size: int, **options: object) -> DecodeSpec:
    q_dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32, "query_len": 1, "q_dtype": q_dtype} | options
    return DecodeSpec(page_size=page_size, kv_format=kv_format, **shape)  # type: ignore[arg-type]


# Every format, V layout, page size against the tile (smaller, equal, larger), mask and kind of split; lengths are short since each program costs 2 ms.
INTERPRETED: list[tuple[Case, DecodeConfig]] = [
    (Case(small_spec("bf16", 16), (0, 1, 17, 70)), ONE_SPLIT),
    (Case(small_spec("bf16", 1, query_len=2), (0, 1, 35, 64), layout="nhd"), THREE_SPLITS),
    (Case(small_spec("bf16", 64, v_layout="transposed", query_len=3, window=20), (2, 63, 65), layout="odd", own_page0=True), THREE_SPLITS),
    (Case(small_spec("bf16", 16, num_q_heads=6, num_kv_heads=3, query_len=4, causal=False, window=9), (3, 16, 50), layout="hnd"), THREE_SPLITS),
    (Case(small_spec("bf16", 8, batch_invariant=True, sinks=True), (0, 7, 33, 90), share_prefix=True), FIXED_SPLITS),
    (Case(small_spec("bf16", 32), (0, 40), max_seq_len=4096), FIXED_SPLITS),
    (Case(small_spec("bf16", 1, head_dim=16), (3, 20), first_page_id=70_000), ONE_SPLIT),
    (Case(small_spec("fp16", 128, soft_cap=20.0, sinks=True), (0, 129), layout="nhd"), ONE_SPLIT),
    (Case(small_spec("fp16", 16, v_layout="transposed", window=1, sinks=True), (1, 17, 40), layout="page_major"), THREE_SPLITS),
    (Case(small_spec("fp8_tensor", 16, query_len=2), (1, 17, 49), layout="hnd"), ONE_SPLIT),
    (Case(small_spec("fp8_tensor", 64, v_layout="transposed", window=30, soft_cap=30.0), (0, 63, 100)), THREE_SPLITS),
    (Case(small_spec("fp8_token", 16, query_len=8, num_q_heads=16), (5, 31, 60), layout="odd"), ONE_SPLIT),
    (Case(small_spec("fp8_token", 1, query_len=2, window=16), (1, 30, 50), own_page0=True), THREE_SPLITS),
    (Case(small_spec("fp8_token", 1024, v_layout="transposed"), (0, 33), layout="nhd"), FIXED_SPLITS),
]


def check_clean(report: CaseReport) -> None:
    assert report.status == "clean", report


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_reference_owns_what_it_reads(case: Case) -> None:
    check_clean(probe_case(get_adapter("reference"), case))


@pytest.fixture(scope="module")
def interpreted(interpreter: WorkerPool) -> dict[str, Future[CaseReport]]:
    """All reports at once, so that every worker is busy while the first is waited for."""
    return {case.name: interpreter.submit(probe_interpreted, case, config, FEW_FILLS) for case, config in INTERPRETED}


@pytest.mark.parametrize("name", [case.name for case, _ in INTERPRETED])
def test_interpreted_triton_owns_what_it_reads(name: str, interpreted: dict[str, Future[CaseReport]]) -> None:
    check_clean(interpreted[name].result())


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[tuple[str, str], Future[CaseReport]]]:
    """Over processes, since nearly every case compiles a kernel of its own; the Hopper kernel's first."""
    pool = process_pool()
    chosen = [("gluon_sm90", case) for case in HOPPER] + [("triton", case) for case in matrix("full")]
    yield {(backend, case.name): pool.submit(probe_by_name, backend, case, "cuda") for backend, case in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in matrix("full")])
def test_compiled_triton_owns_what_it_reads(name: str, compiled: dict[tuple[str, str], Future[CaseReport]]) -> None:
    check_clean(compiled["triton", name].result())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in HOPPER])
def test_the_hopper_kernel_owns_what_it_reads(name: str, compiled: dict[tuple[str, str], Future[CaseReport]]) -> None:
    report = compiled["gluon_sm90", name].result()
    if not is_hopper():
        assert report.refusal is not None
        assert "is not an NVIDIA GPU of compute capability 9.0" in report.refusal
        return
    check_clean(report)


# One launch, of fewer programs than sequences, and of more than there are tiles.
ONE_LAUNCH = {f"{case.name} {n} programs": (case, n) for case in HOPPER[::4] if not case.spec.batch_invariant for n in (3, 150)}


@pytest.fixture(scope="module")
def launched() -> Iterator[dict[str, Future[CaseReport]]]:
    pool = process_pool()
    yield {name: pool.submit(probe_one_launch, case, n) for name, (case, n) in ONE_LAUNCH.items()}
    pool.shutdown(cancel_futures=True)


def probe_one_launch(case: Case, num_programs: int) -> CaseReport:
    config = gluon_decode_sm90.config(case.spec, BatchShape(len(case.seq_lens), max(case.seq_lens), 132))
    return probe_case(BackendAdapter("gluon_sm90", gluon_decode_sm90.one_launch(case.spec, config, num_programs)), case, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_the_hopper_kernel_of_one_launch_owns_what_it_reads(name: str, launched: dict[str, Future[CaseReport]]) -> None:
    report = launched[name].result()
    if is_hopper():
        check_clean(report)
    else:
        assert report.refusal is not None


def test_a_sequence_alone_has_no_neighbours() -> None:
    check_clean(probe_case(BackendAdapter("reference"), Case(small_spec("bf16", 16), (37,))))


def test_leaky_control_is_caught_in_every_region() -> None:
    report = probe_case(get_adapter("leaky_control"), Case(small_spec("bf16", 16, window=20, query_len=2), (0, 1, 15, 33, 90)))
    assert report.status == "leak"
    assert {leak.place for leak in report.leaks if leak.fill == "nan"} >= {"tail.v", "null.v", "freed.v", "left.v", "neighbour"}
    # It masks scores, so that K never leaks, and finite values are multiplied by an exact zero.
    assert {leak.fill for leak in report.leaks} <= {"0xff", "nan", "inf", "random"}
    assert not any(".k" in leak.place for leak in report.leaks)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_reference_leaks_when_its_protection_is_off(kv_format: str) -> None:
    case = Case(small_spec(kv_format, 16, mask_unowned_kv=False), (1, 15, 40))
    assert probe_case(get_adapter("reference"), case).status == "leak"


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", QUICK[::3], ids=lambda case: case.name)
def test_both_flags_give_the_same_bits_on_clean_input(case: Case, backend: str, device: torch.device) -> None:
    assert rows_changed_by_flag(case, backend, device=device) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER[::5], ids=lambda case: case.name)
def test_both_flags_of_the_hopper_kernel_give_the_same_bits_on_clean_input(case: Case, device: torch.device) -> None:
    assert rows_changed_by_flag(case, best_backend(), device=device) == 0


@pytest.mark.slow
def test_both_flags_give_the_same_bits_on_clean_input_interpreted(interpreter: WorkerPool) -> None:
    """Where a tile holds rows that are owned, but not seen by every query row."""
    lengths = (36, 40, 44, 48, 52, 56, 60, 61)
    cases = [
        (Case(small_spec("fp8_token", 16, query_len=8, num_q_heads=4), lengths, layout="odd"), ONE_SPLIT),
        (Case(small_spec("fp8_token", 16, query_len=8, num_q_heads=4, window=20, v_layout="transposed"), lengths), THREE_SPLITS),
        (Case(small_spec("fp8_tensor", 16, query_len=8, num_q_heads=4, window=20), lengths), ONE_SPLIT),
        (Case(small_spec("bf16", 16, query_len=8, num_q_heads=4, window=20, sinks=True), lengths), THREE_SPLITS),
    ]
    futures = {case.name: interpreter.submit(rows_changed_by_flag, case, "triton", config) for case, config in cases}
    assert {name: future.result() for name, future in futures.items()} == dict.fromkeys(futures, 0)


def test_matrix_covers_what_must_be_covered() -> None:
    full = matrix("full")
    for cases, least in ((full, 468), (matrix("quick"), 50)):
        specs = [case.spec for case in cases]
        assert len({case.name for case in cases}) == len(cases) >= least
        assert {(s.kv_format, s.v_layout) for s in specs} == {(kv_format, v_layout) for kv_format, v_layout, _ in FORMATS + RARE_FORMATS}
        assert {s.page_size for s in specs} == {*PAGES, *RARE_PAGES}
        assert {s.group_size for s in specs} >= {1, 3, *GROUPS}
        assert {s.query_len for s in specs} >= {*QUERY_LENS, 8}
        assert {case.layout for case in cases} == set(LAYOUTS)
        for flag in ("window", "soft_cap", "sinks", "batch_invariant", "causal"):
            assert len({getattr(s, flag) for s in specs}) > 1, flag
        for option in ("own_page0", "share_prefix", "first_page_id", "max_seq_len"):
            assert len({getattr(case, option) for case in cases}) > 1, option
    grid = {(c.spec.kv_format, c.spec.v_layout, c.spec.page_size, c.spec.head_dim, c.spec.group_size, c.spec.query_len) for c in full}
    for kv_format, v_layout, _ in FORMATS:
        assert {(kv_format, v_layout, p, d, g, q) for p in PAGES for d in HEAD_DIMS for g in GROUPS for q in QUERY_LENS} <= grid


@pytest.mark.parametrize("case", QUICK[::13], ids=lambda case: case.name)
@pytest.mark.parametrize("fill", FILLS)
def test_fills_change_every_unowned_row_and_no_owned_one(case: Case, fill: str) -> None:
    problem = case.make()
    run = BackendAdapter("reference")(problem)
    poison_everything(problem, run, "zero", seed=0)
    owned = owned_bits(problem)
    poison_everything(problem, run, fill, seed=1)
    assert all(torch.equal(before, after) for before, after in zip(owned, owned_bits(problem), strict=True))
    for region, rows in problem.regions.items():
        for part in parts_of(problem) if rows.numel() else ():
            transposed = part == "v" and problem.kv.v_layout == "transposed"
            bits = row_values(getattr(problem.kv, part), rows, problem.spec.page_size, transposed=transposed)
            assert bits.flatten(1).any(1).all(), (region, part)
    for tensor in run.outputs:
        assert as_bits(tensor).any()


def owned_bits(problem: DecodeProblem) -> list[torch.Tensor]:
    """A copy of everything that some sequence owns."""
    copies = []
    for i_b, seq_len in enumerate(problem.seq_lens.tolist()):
        rows = problem.row_ids(i_b)[problem.spec.window_start(seq_len) :]
        for part in parts_of(problem):
            transposed = part == "v" and problem.kv.v_layout == "transposed"
            copies.append(row_values(getattr(problem.kv, part), rows, problem.spec.page_size, transposed=transposed))
    return copies


def test_short_lengths_meet_every_edge_of_a_page() -> None:
    assert {0, 1, 15, 16, 17} <= set(hostile_lengths(16, short=True)) < set(hostile_lengths(16))
