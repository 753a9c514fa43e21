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
    # More than 16 query rows, which a warpgroup multiplies: 32 and 64, and two blocks of 32.
    (Case(spec("fp8_tensor", 128, 32, 4, num_q_heads=8), (5, 150)), ONE_SPLIT),
    (Case(spec("fp8_token", 128, 16, 4, num_q_heads=16, causal=False, window=70), (66, 200)), ONE_SPLIT),
    (Case(spec("fp8_token", 256, 64, 4, num_q_heads=16, window=20, sinks=True), (5, 150)), ONE_SPLIT),
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


PAGED = Case(spec("fp8_tensor", 64, 16), (300,))
WHOLE_TILES = Case(spec("fp8_token", 64, 64), (300,))
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


STORE_Q = "[M, H], layout, q1)\n"
STORE_P = "p_smem.store(b_p)\n"
FENCE = "        fence_async_shared()\n"
MEETING = "        program_barrier()\n"
UNFENCED = "a product of shared memory that threads stored to, with no fence_async_shared since"
UNMET = "a product of shared memory that threads stored to, with no program_barrier after the fence since"
READ_V = "_read_values(v_tile, H, FP8, a_layout)\n"
WAIT_SCORES = "        b_s = warpgroup_mma_wait(0, [b_s])\n"
WAIT = "mbarrier.wait(v_bars.index(i_slot), phase)"
FAULTS = {
    "no wait": Fault(PAGED, (Edit(WAIT, "pass"),), "a read of shared memory that a copy in flight is still to write"),
    "a wait for the phase before": Fault(PAGED, (Edit(WAIT, WAIT.replace("phase", "phase ^ 1")),), "a copy in flight is still to write"),
    "no meeting": Fault(PAGED, (Edit(" " * 20 + "program_barrier()", " " * 20 + "pass"),), "was read since the last program_barrier"),
    "no meeting of products": Fault(WIDE_GROUPED, (Edit(" " * 20 + "program_barrier()", " " * 20 + "pass"),), "was read since the last program_barrier"),
    "no wait for K": Fault(WIDE_GROUPED, (Edit(WAIT.replace("v_bars", "k_bars"), "pass"),), "a read of shared memory that a copy in flight"),
    "no wait for scores": Fault(WIDE_GROUPED, (Edit(READ_V + WAIT_SCORES, READ_V),), "a product in flight is used as a value"),
    "no wait for values": Fault(GROUPED, (Edit("warpgroup_mma_wait(0, [acc0, acc1])", "acc0, acc1"),), "a product in flight is used as a value"),
    "no fence of q": Fault(GROUPED, (Edit(STORE_Q + FENCE, STORE_Q),), UNFENCED),
    "no barrier of q": Fault(GROUPED, (Edit(FENCE + MEETING, FENCE),), UNMET),
    "no fence of P": Fault(GROUPED, (Edit(STORE_P + FENCE, STORE_P),), UNFENCED),
    "no barrier of P": Fault(GROUPED, (Edit("# All of P is there.\n" + MEETING, "\n"),), UNMET),
    "a slot still to be read": Fault(PAGED, (Edit("gl.where(i_slot == 0, STAGES - 1, i_slot - 1)", "i_slot"),), "its phase was never waited for"),
    "twice the bytes": Fault(PAGED, (Edit("block_type.shape[3] * 2", "block_type.shape[3] * 4"),), "would hang"),
    "a page that is not expected": Fault(PAGED, (Edit("mbarrier.expect(k_bar, BYTES, pred=wanted)", "pass"),), "would hang"),
    "a page that does not exist": Fault(WHOLE_TILES, (Edit("i_tile * TILE // S,", "i_tile * TILE // S + 1,"),), "copy of a box", "out of range"),
    "scales of a page that does not exist": Fault(
        SCALED,
        (
            Edit("m_page = (i_tile < tile_hi) & _owns(o_row // S * S, row_lo, row_hi, S, WINDOW)", "m_page = o_row < row_hi + 2 * S"),
            Edit("_owns(o_row, row_lo, row_hi, 1, WINDOW)", "(o_row >= 0)", "scales"),
        ),
        "load of",
        "out of range",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults(interpreter: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[CaseReport]]:
    return {
        name: interpreter.submit(probe_mutation, "gluon_sm90", "gluon_kernel_sm90.py", fault.edits, fault.case, ONE_SPLIT, (), tmp_path_factory.mktemp("fault"))
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
