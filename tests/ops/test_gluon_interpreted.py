"""The Hopper kernel on a CPU, in our interpreter of Gluon: right, clean, indifferent to the flag and to the batch; and what breaks its copies is seen."""

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch

from atoll.ops.attention import DecodeConfig, DecodeSpec, choose_backend
from atoll.probe import Case, CaseReport
from atoll.probe.oracle import compare
from tests.kit.batches import answer, rows_changed_alone
from tests.kit.mutation import Edit, probe_mutation
from tests.kit.workers import WorkerPool, probe_interpreted, rows_changed_by_flag

FILLS = ("nan", "stale")
ONE_SPLIT = DecodeConfig(tile=64)
WIDE_TILE = DecodeConfig(tile=128)
EIGHT_WARPS = DecodeConfig(tile=128, num_warps=8)
TWO_WARPS = DecodeConfig(tile=32, num_warps=2)
TWO_SPLITS = DecodeConfig(tile=64, num_splits=2)
FIXED_SPLITS = DecodeConfig(tile=64, num_splits=3, tiles_per_split=1)
ONE_LAUNCH = DecodeConfig(tile=64, num_programs=3)
MANY_PROGRAMS = DecodeConfig(tile=64, num_programs=16)


def spec(kv_format: str, head_dim: int, page_size: int, query_len: int = 1, **options: object) -> DecodeSpec:
    q_dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "q_dtype": q_dtype} | options
    return DecodeSpec(head_dim=head_dim, page_size=page_size, query_len=query_len, kv_format=kv_format, **shape)  # type: ignore[arg-type]


# Every format, head dim, page against the tile (a quarter, half, equal, larger), number of query rows and option; the ring of copies goes round in some. Splits
# are merged by a Triton kernel, whose programs cost more time than all the rest: there a batch has few rows.
CASES: list[tuple[Case, DecodeConfig]] = [
    (Case(spec("bf16", 128, 16), (0, 1, 17, 300), layout="nhd"), ONE_SPLIT),
    (Case(spec("bf16", 256, 128, num_q_heads=1, sinks=True, batch_invariant=True), (5, 130)), FIXED_SPLITS),
    (Case(spec("fp16", 256, 64, soft_cap=20.0, sinks=True), (0, 64, 65), own_page0=True), ONE_SPLIT),
    (Case(spec("fp16", 128, 32, 4, causal=False, window=70), (5, 150)), WIDE_TILE),
    (Case(spec("fp8_tensor", 64, 16, 4, window=20, sinks=True), (0, 66, 150), layout="hnd"), ONE_SPLIT),
    (Case(spec("fp8_tensor", 256, 64, num_q_heads=6, num_kv_heads=2), (63, 200)), ONE_SPLIT),
    (Case(spec("fp8_tensor", 128, 32, num_q_heads=1, q_dtype=torch.float16, window=100), (40, 300), share_prefix=True), TWO_SPLITS),
    (Case(spec("fp8_token", 128, 16, 8), (7, 65, 129)), ONE_SPLIT),
    (Case(spec("fp8_token", 64, 128, 4, num_q_heads=16, soft_cap=30.0), (3, 131)), ONE_SPLIT),
    (Case(spec("fp8_token", 256, 16, 3, window=1), (2, 90)), ONE_SPLIT),
    (Case(spec("fp8_token", 64, 64, num_q_heads=1), (0, 40), max_seq_len=1024), FIXED_SPLITS),
    # Copies lane by lane of tiles of several pages, by TMA of one page and of two.
    (Case(spec("fp8_tensor", 256, 16), (0, 63, 300), layout="nhd"), ONE_SPLIT),
    (Case(spec("bf16", 128, 16, 4, num_q_heads=8, window=70), (5, 300)), ONE_SPLIT),
    (Case(spec("fp8_token", 64, 16, num_kv_heads=2, num_q_heads=4), (5, 300, 0), layout="hnd"), ONE_LAUNCH),
    (Case(spec("fp8_token", 128, 64, 4, num_q_heads=8, window=70), (5, 300)), EIGHT_WARPS),
    # Tilings of large batches.
    (Case(spec("fp8_tensor", 256, 16, num_q_heads=8), (5, 300)), EIGHT_WARPS),
    (Case(spec("fp8_token", 256, 64), (0, 33, 150)), TWO_WARPS),
    (Case(spec("bf16", 256, 16), (1, 95)), TWO_WARPS),
    # More than 16 query rows, which a warpgroup multiplies: 32 and 64, and two blocks of 32.
    (Case(spec("fp8_tensor", 128, 32, 4, num_q_heads=8), (5, 150)), ONE_SPLIT),
    (Case(spec("fp8_token", 128, 16, 4, num_q_heads=16, causal=False, window=70), (66, 200)), ONE_SPLIT),
    (Case(spec("fp8_token", 256, 64, 4, num_q_heads=16, window=20, sinks=True), (5, 150)), ONE_SPLIT),
    # Of one program, whose scales have shared memory to themselves.
    (Case(spec("fp8_token", 256, 64, 4, num_q_heads=8), (150,)), ONE_SPLIT),
    (Case(spec("bf16", 128, 64, 4, num_q_heads=16, window=70), (150, 0)), ONE_SPLIT),
    (Case(spec("bf16", 256, 128, 4, num_q_heads=8, soft_cap=20.0), (3, 131)), ONE_SPLIT),
    (Case(spec("fp8_tensor", 128, 64, 4, num_q_heads=8), (5, 300, 0)), ONE_LAUNCH),
    # One launch: sequences cut within a program's stretch and over several, whole ones, empty ones; more parts than are added up at a time; blocks of rows.
    (Case(spec("fp8_tensor", 64, 16, num_q_heads=6, num_kv_heads=2, sinks=True), (1, 17, 300, 0, 150)), ONE_LAUNCH),
    (Case(spec("bf16", 128, 64, 4, window=70), (5, 300, 0)), ONE_LAUNCH),
    (Case(spec("fp8_token", 64, 64), (3, 520)), MANY_PROGRAMS),
    (Case(spec("fp8_token", 64, 32, 5, num_q_heads=16, soft_cap=30.0), (9, 70)), ONE_LAUNCH),
    (Case(spec("fp8_tensor", 64, 32, 5, num_q_heads=16, window=30), (9, 70)), ONE_SPLIT),
]


@pytest.fixture(scope="module")
def reports(interpreter: WorkerPool) -> dict[str, Future[CaseReport]]:
    return {case.name: interpreter.submit(probe_interpreted, case, config, FILLS, "gluon_sm90") for case, config in CASES}


@pytest.mark.parametrize("name", [case.name for case, _ in CASES])
def test_it_is_right_and_owns_what_it_reads(name: str, reports: dict[str, Future[CaseReport]]) -> None:
    report = reports[name].result()
    assert report.status == "clean", report


def test_both_flags_give_the_same_bits_on_clean_input(interpreter: WorkerPool) -> None:
    """Where a tile holds rows that are owned, but not seen by every query row, and rows that nobody owns."""
    lengths = (36, 64, 75)
    cases = [
        (Case(spec("fp8_token", 64, 16, 8), lengths), ONE_SPLIT),
        (Case(spec("fp8_token", 64, 32, 4, window=20), lengths), ONE_SPLIT),
        (Case(spec("fp8_tensor", 128, 16, window=20), lengths), ONE_SPLIT),
        (Case(spec("bf16", 128, 64, 4), lengths), ONE_SPLIT),
        (Case(spec("fp8_token", 64, 64), lengths), ONE_LAUNCH),
        (Case(spec("fp8_token", 128, 16, 4, num_q_heads=8, window=20), lengths), ONE_SPLIT),
        (Case(spec("bf16", 128, 64, 4, num_q_heads=8), lengths), ONE_SPLIT),
    ]
    futures = {case.name: interpreter.submit(rows_changed_by_flag, case, "gluon_sm90", config) for case, config in cases}
    assert {name: future.result() for name, future in futures.items()} == dict.fromkeys(futures, 0)


def within_the_bound(case: Case, config: DecodeConfig) -> bool:
    problem = case.make()
    return compare(problem, *answer("gluon_sm90", problem, config)).within


def test_blocks_of_rows_are_merged(interpreter: WorkerPool) -> None:
    """Once only, since 80 rows are as many programs of the merge."""
    rows = Case(spec("fp8_tensor", 64, 32, 5, num_q_heads=16, window=30), (70,))
    assert interpreter.submit(within_the_bound, rows, TWO_SPLITS).result()


def test_one_launch_takes_more_sequences_than_a_warp_has_lanes(interpreter: WorkerPool) -> None:
    case = Case(spec("fp8_tensor", 64, 64, num_q_heads=1), (*(i % 2 for i in range(32)), 130))
    assert interpreter.submit(probe_interpreted, case, ONE_LAUNCH, ("nan",), "gluon_sm90").result().status == "clean"


def test_batch_invariant_holds(interpreter: WorkerPool) -> None:
    crowd = Case(spec("fp8_token", 64, 16, num_q_heads=1, batch_invariant=True, sinks=True), (1, 65, 150))
    assert interpreter.submit(rows_changed_alone, "gluon_sm90", crowd, FIXED_SPLITS).result() == 0


def error_beside_a_scale(value: float) -> float:
    """Of a query token that does not see the last row, whose scale of V is `value`."""
    problem = Case(spec("fp8_token", 64, 16, 2), (70,)).make()
    assert problem.kv.v_scale is not None
    problem.kv.v_scale[problem.pages[0][69 // 16], :, 69 % 16] = value
    (out, _), (expected, _) = (answer(backend, problem, config) for backend, config in (("gluon_sm90", ONE_SPLIT), ("reference", None)))
    return float((out[0, 0] - expected[0, 0]).float().abs().max())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_the_scale_of_a_row_that_a_token_does_not_see_is_no_matter_to_it(value: float, interpreter: WorkerPool) -> None:
    assert interpreter.submit(error_beside_a_scale, value).result() < 0.02


PAGED = Case(spec("fp8_tensor", 64, 16), (300,))
WHOLE_TILES = Case(spec("fp8_token", 64, 64), (300,))
# The page table has hostile entries left of the second one's window.
BEHIND = Case(spec("fp8_tensor", 64, 16, window=20), (3, 252))
SCALED = Case(spec("fp8_token", 64, 16), (1, 40))
# A warpgroup multiplies, a full tile and a masked one.
GROUPED = Case(spec("fp8_tensor", 128, 64, 4, num_q_heads=8), (70,))
WIDE_GROUPED = Case(spec("bf16", 128, 64, 4, num_q_heads=8), (300,))


@dataclass(frozen=True)
class Fault:
    """An edit beside the protections of test_mutation, to what keeps copies, reads and the table apart: the status, and what is said."""

    case: Case
    edits: tuple[Edit, ...]
    said: str
    status: str = "failed"
    file: str = "gluon_kernel_sm90.py"


STORE_Q = "[M, H], layout, q1)\n"
STORE_P = "p_smem.store(b_p)\n"
FENCE = "        fence_async_shared()\n"
MEETING = "        program_barrier()\n"
UNFENCED = "a product of shared memory that threads stored to, with no fence_async_shared since"
UNMET = "a product of shared memory that threads stored to, with no program_barrier after the fence since"
WAIT_SCORES = "        b_s = warpgroup_mma_wait(0, [b_s])\n    b_s = b_s * "
WAIT_K = "mbarrier.wait(k_bars.index(i_slot), phase)"
WAIT = "mbarrier.wait(v_bar, phase)"
WAIT_V = f"between the copies' start and this.\n        {WAIT}"
WAIT_V_EARLY = f"if WAIT_EARLY:\n        {WAIT}"
MEET = Edit(" " * 20 + "program_barrier()", " " * 20 + "pass")
COPIES = "gluon_copies_sm90.py"
UNSAFE = "was read since the last program_barrier"
IN_FLIGHT = "a read of shared memory that a copy in flight is still to write"
FAULTS = {
    "no wait": Fault(PAGED, (Edit(WAIT_V, WAIT_V.replace(WAIT, "pass")),), IN_FLIGHT),
    "no wait for a copy by TMA": Fault(WHOLE_TILES, (Edit(WAIT_V, WAIT_V.replace(WAIT, "pass")),), IN_FLIGHT),
    "a wait for the phase before": Fault(PAGED, (Edit(WAIT_V, WAIT_V.replace("phase", "phase ^ 1")),), IN_FLIGHT),
    "no meeting": Fault(PAGED, (MEET,), UNSAFE),
    "no meeting for a copy by TMA": Fault(WHOLE_TILES, (MEET,), UNSAFE),
    "no meeting of products": Fault(WIDE_GROUPED, (MEET,), UNSAFE),
    "no wait for K": Fault(WIDE_GROUPED, (Edit(WAIT_K, "pass"),), IN_FLIGHT),
    "no wait for V that is read early": Fault(GROUPED, (Edit(WAIT_V_EARLY, WAIT_V_EARLY.replace(WAIT, "pass")),), IN_FLIGHT),
    "no wait for scores": Fault(GROUPED, (Edit(WAIT_SCORES, "    b_s = b_s * "),), "a product in flight is used as a value"),
    "no wait for values": Fault(GROUPED, (Edit("warpgroup_mma_wait(0, [acc0, acc1])", "acc0, acc1"),), "a product in flight is used as a value"),
    "no fence of q": Fault(GROUPED, (Edit(STORE_Q + FENCE, STORE_Q),), UNFENCED),
    "no barrier of q": Fault(GROUPED, (Edit(FENCE + MEETING, FENCE),), UNMET),
    "no fence of P": Fault(GROUPED, (Edit(STORE_P + FENCE, STORE_P),), UNFENCED),
    "no barrier of P": Fault(GROUPED, (Edit("# All of P is there.\n" + MEETING, "\n"),), UNMET),
    "a slot still to be read": Fault(PAGED, (Edit("gl.where(i_slot == 0, STAGES - 1, i_slot - 1)", "i_slot"),), "a copy into shared memory that a copy in"),
    "twice the bytes": Fault(WHOLE_TILES, (Edit("block_type.shape[3] * 2", "block_type.shape[3] * 4"),), "would hang", file=COPIES),
    "a page that is not expected": Fault(WHOLE_TILES, (Edit("mbarrier.expect(k_bar, BYTES, pred=wanted)", "pass"),), "would hang", file=COPIES),
    "lanes that do not arrive": Fault(
        PAGED, (Edit("async_copy.mbarrier_arrive(v_bar, increment_count=False)", "pass"),), "would hang", file=COPIES
    ),
    "lanes that are not counted": Fault(PAGED, (Edit("1 if BULK else 32 * NUM_WARPS", "1"),), "arrivals at a barrier that waits for", file=COPIES),
    "scales that are not counted": Fault(
        WHOLE_TILES, (Edit("= V_COUNT + 32 * NUM_WARPS if", "= V_COUNT if"),), "arrivals at a barrier that waits for", file=COPIES
    ),
    "rows that lie apart": Fault(PAGED, (Edit("(gl.expand_dims(o_w, 0), 0)", "(gl.expand_dims(2 * o_w, 0), 0)"),), "in one piece", file=COPIES),
    "a page that does not exist": Fault(
        WHOLE_TILES, (Edit("i_tile * TILE // S, mask", "i_tile * TILE // S + 1, mask"),), "copy of a box", "out of range", COPIES
    ),
    "pages past the last": Fault(PAGED, (Edit("gl.minimum(o_page, (row_hi - 1) // S)", "o_page"),), "load of", "out of range", COPIES),
    "pages before a window": Fault(BEHIND, (Edit("gl.maximum(o_page, row_lo // S)", "o_page"),), "load of", "out of range", COPIES),
    "scales of a page that does not exist": Fault(
        SCALED,
        (Edit("gl.minimum(o_row, row_hi - 1)", "o_row", "scales"),),
        "load of",
        "out of range",
        COPIES,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults(interpreter: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[CaseReport]]:
    return {
        name: interpreter.submit(probe_mutation, "gluon_sm90", fault.file, fault.edits, fault.case, ONE_SPLIT, (), tmp_path_factory.mktemp("fault"))
        for name, fault in FAULTS.items()
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_its_copies_is_seen(name: str, faults: dict[str, Future[CaseReport]]) -> None:
    report = faults[name].result()
    assert report.status == FAULTS[name].status, report
    assert FAULTS[name].said in (report.failure or report.out_of_range or "")


# Nine programs of two tiles: sequences of three and of five tiles are cut into two and three parts, and a program may hold two of them.
CUT = Case(spec("fp8_tensor", 64, 64, num_q_heads=4, num_kv_heads=2), (150, 17, 290))
NINE = DecodeConfig(tile=64, num_programs=9)

# Nine parts of one sequence, which are two groups.
GROUPS = Case(spec("fp8_tensor", 64, 64), (3, 520))

# What keeps the programs of one launch apart.
LAUNCH_FAULTS: dict[str, tuple[Edit, Case, DecodeConfig]] = {
    "a count that stays": (Edit("gl.store(arrivals_ptr, 0, mask=last)", "pass"), CUT, NINE),
    "not waiting for the last": (Edit("== others", "== 1"), CUT, NINE),
    "one place for two parts": (Edit("gl.where(pair_lo > i_p * share, 1, 0)", "0"), CUT, NINE),
    "another sequence's count": (Edit("_is_last(arrivals_ptr + _part_of(group, share, pair_lo),", "_is_last(arrivals_ptr,"), CUT, NINE),
    "groups counted as parts": (Edit("arrivals_ptr + 2 * gl.num_programs(0) +", "arrivals_ptr +"), GROUPS, MANY_PROGRAMS),
    "a group for the whole": (Edit("last - first < GROUP_PARTS", "last >= first"), GROUPS, MANY_PROGRAMS),
}


@pytest.fixture(scope="module")
def launch_faults(interpreter: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[CaseReport]]:
    def probe(edit: Edit, case: Case, config: DecodeConfig) -> Future[CaseReport]:
        directory = tmp_path_factory.mktemp("fault")
        return interpreter.submit(probe_mutation, "gluon_sm90", "gluon_balanced_sm90.py", (edit,), case, config, ("nan",), directory)

    return {name: probe(*fault) for name, fault in LAUNCH_FAULTS.items()}


@pytest.mark.parametrize("name", LAUNCH_FAULTS)
def test_a_fault_between_programs_is_seen(name: str, launch_faults: dict[str, Future[CaseReport]]) -> None:
    assert launch_faults[name].result().status in ("leak", "wrong")


def test_the_cases_of_these_faults_are_clean_without_them(interpreter: WorkerPool) -> None:
    for case, config in {(case, config) for _, case, config in LAUNCH_FAULTS.values()}:
        assert interpreter.submit(probe_interpreted, case, config, ("nan",), "gluon_sm90").result().status == "clean"


def chosen_on_a_cpu() -> tuple[str, str]:
    name, _, refusals = choose_backend(spec("fp8_tensor", 64, 16), torch.device("cpu"))
    return name, refusals["gluon_sm90"]


def test_auto_does_not_take_it_on_a_cpu(interpreter: WorkerPool) -> None:
    assert interpreter.submit(chosen_on_a_cpu).result() == ("triton", "device cpu is not an NVIDIA GPU of compute capability 9.0")


def test_without_the_interpreter_it_refuses_a_cpu() -> None:
    assert probe_interpreted(PAGED, ONE_SPLIT, (), "gluon_sm90").status == "refused"
