"""Negative controls: each protection of the decode backends is taken out of the source, and the probe must turn red."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.ops.attention import DecodeConfig, DecodeSpec
from atoll.probe import Case, CaseReport
from atoll.probe.parallel import process_pool
from tests.kit.hopper import is_hopper
from tests.kit.mutation import OPS, Edit, mutated_source, probe_mutation, tags
from tests.kit.workers import WorkerPool

TAGGED_FILES = ("triton_decode.py", "combine.py", "gluon_copies_sm90.py", "gluon_kernel_sm90.py", "gluon_balanced_sm90.py")

ONE_SPLIT = DecodeConfig(tile=32, num_splits=1)
THREE_SPLITS = DecodeConfig(tile=16, num_splits=3)


def spec(kv_format: str = "bf16", **options: object) -> DecodeSpec:
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32, "page_size": 16} | options
    return DecodeSpec(kv_format=kv_format, **shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mutation:
    """A protection taken out: what the probe then says of a case chosen to need it."""

    name: str
    file: str
    edits: tuple[Edit, ...]
    case: Case
    finds: str  # a status of CaseReport
    fill: str = "nan"
    config: DecodeConfig | None = ONE_SPLIT


def tagged(tag: str, old: str, new: str, case: Case, finds: str = "leak", *, file: str = "triton_decode.py", why: str = "", **rest: object) -> Mutation:
    return Mutation(f"{tag} {why}".strip(), file, (Edit(old, new, tag),), case, finds, **rest)  # type: ignore[arg-type]


PLAIN = Case(spec(), (1, 17, 40))
PER_TOKEN = Case(spec("fp8_token"), (1, 17, 40))
DRAFTS = Case(spec(query_len=3, window=20), (2, 17, 50))
SCALED_DRAFTS = Case(spec("fp8_token", query_len=3), (3, 17, 50))


def windowed(page_size: int) -> Case:
    """The window of the second sequence starts inside a tile, and its table holds garbage left of it."""
    return Case(spec("fp8_token", window=8, page_size=page_size), (40, 60, 61))


TRITON = [
    tagged("rows", "(o_row < common_hi)", "(o_row >= 0)", PLAIN, why="right edge"),
    tagged("rows", "(o_row >= common_lo)", "(o_row >= 0)", Case(spec(window=20), (1, 17, 50)), why="left edge"),
    # K and V loads are masked apart; the scale of a key is loaded at whatever page the table names.
    tagged("table", "((first_page + i) * S < seq_len)", "(first_page >= 0)", PER_TOKEN, "out of range", why="right edge"),
    tagged("table", "((first_page + i + 1) * S > window_start)", "(first_page >= 0)", windowed(page_size=8), "out of range", why="left edge"),
    tagged("small pages", "(o_page * S < seq_len)", "(o_page >= 0)", Case(spec("fp8_token", page_size=2), (1, 17, 40)), "out of range", why="right edge"),
    tagged("small pages", "(o_page * S + S > window_start)", "(o_page >= 0)", windowed(page_size=2), "out of range", why="left edge"),
    tagged("partly seen rows", "o_row < seq_len", "o_row >= 0", Case(spec(query_len=3, window=20, causal=False), (3, 17, 50)), "out of range"),
    tagged("values", "mask=m_rows[:, None], other=0.0", "", PLAIN),
    tagged("values", "mask=m_rows[:, None], other=0.0", "", DRAFTS, why="left of a window"),
    tagged("transposed values", "mask=m_rows[None, :], other=0.0", "", Case(spec(v_layout="transposed"), (1, 17, 40))),
    tagged("scores", 'tl.where(m_seen, b_s, float("-inf"))', "b_s", PER_TOKEN),
    tagged("scores", 'float("-inf")', "-1.0e30", Case(spec(query_len=3), (1, 2, 17)), "wrong", why="finite sentinel"),
    tagged("value scales", "mask=m_rows, other=0.0", "", PER_TOKEN, fill="max"),
    tagged("seen scales", "tl.where(m_seen, b_p, 0.0)", "b_p", SCALED_DRAFTS, "control"),
    tagged("partly seen values", "tl.where(m_v[:, None], b_v, 0.0)", "b_v", DRAFTS, "control"),
    tagged("splits", "o_s < num_used", "o_s >= 0", Case(spec(), (1, 17, 40)), file="combine.py", config=DecodeConfig(tile=16, num_splits=64)),
]


def gluon(tag: str, old: str, new: str, case: Case, finds: str = "leak", **rest: object) -> Mutation:
    return tagged(tag, old, new, case, finds, **({"file": "gluon_kernel_sm90.py", "config": DecodeConfig()} | rest))  # type: ignore[arg-type]


def copied(tag: str, old: str, new: str, case: Case, **rest: object) -> Mutation:
    return gluon(tag, old, new, case, file="gluon_copies_sm90.py", fill="max", **rest)


def hopper_spec(kv_format: str = "fp8_tensor", **options: object) -> DecodeSpec:
    return spec(kv_format, head_dim=64, **options)


HOPPER_PLAIN = Case(hopper_spec(), (1, 17, 40, 150))
HOPPER_WIDE = Case(spec("bf16", head_dim=128), (1, 17, 40, 150))
HOPPER_DRAFTS = Case(hopper_spec(query_len=3), (3, 17, 66, 150))
HOPPER_WINDOW = Case(hopper_spec(query_len=3, window=70), (3, 17, 66, 150))
# A warpgroup multiplies: 24 query rows.
HOPPER_GROUPED = Case(spec("fp8_tensor", num_q_heads=8, head_dim=128, query_len=3, window=70), (3, 17, 66, 150))
HOPPER_WIDE_GROUPED = Case(spec("bf16", num_q_heads=8, head_dim=128, query_len=3), (3, 17, 66))

UNCLEARED = ("gl.where(gl.expand_dims(m_v, 1), b_v, 0)", "b_v")
UNSEEN = ("_holds_nan(right, FP8, BF16)", "_holds_nan(right, FP8, BF16) & (row_hi < 0)")

# What a table's hostile entries name is not among these: on a GPU the copies' engine reads zeros beyond the pool, and a load of a scale there would end the
# process (tests/ops/test_gluon_interpreted.py has them).
GLUON = [
    gluon("scores", 'gl.where(m_seen, b_s, float("-inf"))', "b_s", HOPPER_PLAIN),
    gluon("scores", 'float("-inf")', "-1.0e30", Case(hopper_spec(query_len=3), (1, 2, 17)), "wrong", why="finite sentinel"),
    gluon("values", "_keep(ones, v0)", "v0", HOPPER_PLAIN),
    gluon("values", "_keep(ones, v0)", "v0", HOPPER_DRAFTS, why="of drafts"),
    gluon("values", "_keep(ones, v0)", "v0", Case(hopper_spec(page_size=64), (1, 17, 40, 150)), why="copied by TMA"),
    gluon("wide values", "_keep(ones, v0)", "v0", HOPPER_WIDE, why="first half"),
    gluon("wide values", "_keep(ones, v1)", "v1", HOPPER_WIDE, why="second half"),
    gluon("drafts", "i_row <= o_position if CAUSAL else o_position == o_position", "o_position == o_position", HOPPER_DRAFTS, "control"),
    gluon("windows of drafts", "(i_row > o_position - window)", "(o_position == o_position)", HOPPER_WINDOW, "control"),
    gluon("seen values", *UNSEEN, HOPPER_DRAFTS, "control"),
    gluon("seen values left of a window", "nan_seen | _holds_nan(left, FP8, BF16)", "nan_seen", HOPPER_WINDOW, "control"),
    gluon("values of a warpgroup", *UNCLEARED, HOPPER_GROUPED),
    gluon("values of a warpgroup", *UNCLEARED, HOPPER_WIDE_GROUPED, why="of 16 bits"),
    gluon("windows of drafts", "(i_row > o_position - window)", "(o_position == o_position)", HOPPER_GROUPED, "control", why="of a warpgroup"),
    gluon("seen values", *UNSEEN, HOPPER_WIDE_GROUPED, "control", why="of a warpgroup"),
    gluon("left edge", "(common_lo + TILE - 1) // TILE", "common_lo // TILE", Case(hopper_spec(window=100), (1, 150, 200))),
    gluon("right edge", "common_hi // TILE", "(common_hi + TILE - 1) // TILE", HOPPER_PLAIN),
    # To the end and the beginning of a page that holds an owned row.
    copied("scales", "row_hi - 1", "(row_hi - 1) // 16 * 16 + 15", Case(hopper_spec("fp8_token"), (1, 17, 40))),
    copied(
        "scales left of a window", "gl.maximum(o_row, row_lo)", "gl.maximum(o_row, row_lo // 16 * 16)", Case(hopper_spec("fp8_token", window=8), (40, 60, 61))
    ),
    copied(
        *("scales", "row_hi - 1", "(row_hi - 1) // 16 * 16 + 15", Case(spec("fp8_token", num_q_heads=8, head_dim=128, query_len=3), (3, 17, 40))),
        why="of a warpgroup",
    ),
    gluon("seen scales", "gl.where(m_seen, b_p, 0.0)", "b_p", Case(hopper_spec("fp8_token", query_len=3), (3, 17, 50)), "control"),
    tagged(
        *("parts", "i_first + j * stride <= last", "i_first >= first", Case(hopper_spec(), (17, 300))),
        file="gluon_balanced_sm90.py",
        config=DecodeConfig(num_programs=5),
    ),
]

# The reference slices, so that it has no line to take out: these shift a slice by one row.
REFERENCE = [
    Mutation(
        "reference, right edge",
        "reference.py",
        (Edit("seq_lens = plan.seq_lens.tolist()", "seq_lens = [n + 1 for n in plan.seq_lens.tolist()]"),),
        Case(spec(), (1, 17, 40)),
        "leak",
    ),
    Mutation(
        "reference, left edge",
        "reference.py",
        (
            Edit("spec.window_start(seq_len) for seq_len", "max(0, spec.window_start(seq_len) - 1) for seq_len"),
            Edit("max(0, position - spec.window + 1)", "max(0, position - spec.window)"),
        ),
        Case(spec(window=20), (17, 50)),
        "leak",
    ),
    Mutation(
        "reference, empty rows",
        "reference.py",
        (Edit("b_out = torch.zeros_like(scaled_q)", "b_out = out.float().view(scaled_q.shape)"),),
        Case(spec(query_len=3), (0, 1, 17)),
        "leak",
    ),
]


def backend_of(mutation: Mutation) -> str:
    return "gluon_sm90" if mutation in GLUON else "triton"


def check_found(report: CaseReport, mutation: Mutation) -> None:
    assert report.status == mutation.finds, f"{mutation.name}: {report}"


@pytest.fixture(scope="module")
def mutated(interpreter: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Mutation, Future[CaseReport]]:
    def probe(m: Mutation) -> Future[CaseReport]:
        directory = tmp_path_factory.mktemp(re.sub(r"\W+", "_", m.name))
        return interpreter.submit(probe_mutation, backend_of(m), m.file, m.edits, m.case, m.config, (m.fill,), directory)

    return {mutation: probe(mutation) for mutation in (*TRITON, *GLUON)}


@pytest.mark.parametrize("mutation", TRITON, ids=lambda mutation: mutation.name)
def test_taking_out_a_protection_of_the_triton_kernel_is_seen(mutation: Mutation, mutated: dict[Mutation, Future[CaseReport]]) -> None:
    check_found(mutated[mutation].result(), mutation)


@pytest.mark.parametrize("mutation", GLUON, ids=lambda mutation: mutation.name)
def test_taking_out_a_protection_of_the_interpreted_hopper_kernel_is_seen(mutation: Mutation, mutated: dict[Mutation, Future[CaseReport]]) -> None:
    report = mutated[mutation].result()
    # Rows that no copy wrote hold NaN from the first run on, where those of a GPU hold what an earlier tile left: then the clean answer is wrong already.
    if report.status != "wrong":
        check_found(report, mutation)


@pytest.fixture(scope="module")
def mutated_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, bool], Future[CaseReport]]]:
    """Each Hopper case with its mutation (True) and without, over processes: each compiles a kernel of its own."""
    pool = process_pool()

    def probe(m: Mutation, edits: tuple[Edit, ...]) -> Future[CaseReport]:
        directory = tmp_path_factory.mktemp(re.sub(r"\W+", "_", m.name))
        return pool.submit(probe_mutation, "gluon_sm90", m.file, edits, m.case, m.config, (m.fill,), directory, "cuda")

    yield {(m.name, mutate): probe(m, m.edits if mutate else ()) for m in GLUON for mutate in (True, False)}
    pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mutation", GLUON, ids=lambda mutation: mutation.name)
def test_taking_out_a_protection_of_the_compiled_hopper_kernel_is_seen(mutation: Mutation, mutated_on_gpu: dict[tuple[str, bool], Future[CaseReport]]) -> None:
    if is_hopper():
        check_found(mutated_on_gpu[mutation.name, True].result(), mutation)
    assert mutated_on_gpu[mutation.name, False].result().status == ("clean" if is_hopper() else "refused")


@pytest.mark.parametrize("mutation", REFERENCE, ids=lambda mutation: mutation.name)
def test_taking_out_a_protection_of_the_reference_is_seen(mutation: Mutation, tmp_path: Path) -> None:
    check_found(probe_mutation("reference", mutation.file, mutation.edits, mutation.case, None, (mutation.fill,), tmp_path), mutation)


@pytest.mark.slow
def test_every_case_here_is_clean_without_its_mutation(interpreter: WorkerPool, tmp_path: Path) -> None:
    distinct = {(backend_of(m), m.case.name, m.case.seq_lens, m.fill, m.config): m for m in (*TRITON, *GLUON)}
    reports = []
    for i, m in enumerate(distinct.values()):
        directory = tmp_path / str(i)
        directory.mkdir()
        reports.append(interpreter.submit(probe_mutation, backend_of(m), m.file, (), m.case, m.config, (m.fill,), directory))
    assert [report.result().status for report in reports] == ["clean"] * len(reports)


@pytest.mark.parametrize("file", TAGGED_FILES)
def test_every_tagged_protection_has_a_mutation(file: str) -> None:
    assert tags(file) == {edit.tag for mutation in (*TRITON, *GLUON) if mutation.file == file for edit in mutation.edits}


def test_no_other_file_is_tagged() -> None:
    assert {path.name for path in OPS.glob("*.py") if tags(path.name)} == set(TAGGED_FILES)


def test_an_edit_that_fits_no_line_is_refused() -> None:
    with pytest.raises(AssertionError, match="adapt the table"):
        mutated_source("combine.py", [Edit("no such text", "", "splits")])
