"""The decode report on made-up rows with known answers: each target is seen met and, just past its limit, missed; what must not be mixed is refused."""

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from atoll.bench.decode_report import report_lines
from atoll.bench.plot import plot_over_floor
from atoll.bench.published import Published, PublishedPeer, read_published
from atoll.bench.results import Results, is_peer, make_results, read_results
from atoll.bench.rows import DecodeRow, Environment, append_jsonl
from atoll.bench.shapes import full_shapes
from atoll.bench.targets import Verdict, judge
from atoll.cli import app
from atoll.errors import ConfigError

ENV = Environment("NVIDIA H200", "abc", "2.11.0", "3.6.0", "12345678")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
ROOF_GBPS = 4000.0
ONE = "35b-tp1/bf16/p64/q1/1x1024"
ON_A_LATER_CASE = "35b-tp1/fp8_tensor/p128/q1/64x4096"

Change = Callable[[DecodeRow], None]


def made_rows(*changes: Change) -> list[DecodeRow]:
    """Every shape as all targets want it, then changed."""
    rows = [copy.copy(row) for row in perfect_rows()]
    for change in changes:
        for row in rows:
            change(row)
    return rows


@functools.cache
def perfect_rows() -> list[DecodeRow]:
    """At 98 % of the roof, the mask for nothing, the portable kernel faster by a tenth, and a peer that takes half as long again and is less exact."""
    variants: tuple[tuple[str, bool | None, int, float, float], ...] = (
        ("gluon_sm90", True, 0, 1.0, 0.002),
        ("gluon_sm90", True, 1, 1.0, 0.002),
        ("gluon_sm90", False, 0, 1.0, 0.002),
        ("triton", True, 0, 0.9, 0.002),
        ("flashinfer_xqa", None, 0, 1.5, 0.03),
    )
    rows = []
    for l2, shape, (backend, mask, repeat, share, error) in itertools.product(("warm", "cold"), full_shapes(), variants):
        num_bytes = shape.batch * shape.ctx
        time_us = share * num_bytes / ROOF_GBPS / 1e3 / 0.98
        rows.append(DecodeRow(shape.name, shape.batch, shape.ctx, backend, mask, repeat, l2, num_bytes, 1, time_us, 0.0, error, ROOF_GBPS, run="full"))
    return rows


def results_of(*changes: Change) -> Results:
    return make_results([(row, ENV) for row in made_rows(*changes)])


def verdicts_of(*changes: Change, published: Published | None = None) -> dict[str, Verdict]:
    return {verdict.target: verdict for verdict in judge(results_of(*changes), published)}


def change(case: str, kind: str, *, time: float = 1.0, time_us: float | None = None, error: float | None = None, l2: str = "warm") -> Change:
    """Of one case, or of all that contain it: the time `time` times as long or just `time_us`, the error as given."""
    kinds = {"masked": (True, 0), "again": (True, 1), "unmasked": (False, 0), "peer": (None, 0)}

    def apply(row: DecodeRow) -> None:
        wanted = row.backend != "triton" and (row.mask_unowned_kv, row.repeat) == kinds[kind]
        if wanted and case in row.case and row.l2 == l2 and row.time_us is not None:
            row.time_us = time_us if time_us is not None else row.time_us * time
            row.rel_error = error if error is not None else row.rel_error

    return apply


def all_three(case: str, time_us: float) -> list[Change]:
    """Masked, again and unmasked alike, so that nothing but the time is said."""
    return [change(case, kind, time_us=time_us) for kind in ("masked", "again", "unmasked")]


def test_rows_that_reach_everything_meet_every_target() -> None:
    found = verdicts_of()
    assert [verdict for verdict in found.values() if not verdict.met] == []
    assert len(found) == 15 + 3 + 2 + 1 + 2 * 3 + 3


TIME = "bf16 1 x 1024, each page size"
ROOF = "fp8_token 256 x 16384, share of the roof, each page size"
WORST, BEYOND = "masked against unmasked, warm L2, worst", "masked against unmasked, warm L2, above +3% beyond the case's noise"
LARGEST = "35b-tp1/fp8_token/p16/q1/256x16384"
LARGEST_FLOOR_US = 256 * 16384 / ROOF_GBPS / 1e3


@pytest.mark.parametrize(
    ("changes", "target", "met"),
    [
        (all_three(ONE, 5.0), TIME, True),
        (all_three(ONE, 5.001), TIME, False),
        (all_three(LARGEST, LARGEST_FLOOR_US / 0.9501), ROOF, True),
        (all_three(LARGEST, LARGEST_FLOOR_US / 0.9499), ROOF, False),
        ([change("397b-tp4/fp8_tensor/p16/q1/4x1024", "masked", error=0.003)], "fp8_tensor, error", True),
        ([change("397b-tp4/fp8_tensor/p16/q1/4x1024", "masked", error=0.00301)], "fp8_tensor, error", False),
        ([change("397b-tp4/fp8_tensor/p16/q1/4x1024", "masked", error=0.00301, l2="cold")], "fp8_tensor, error", False),
        ([change(ONE, "peer", error=0.002)], "error against each peer's", True),
        ([change(ONE, "peer", error=0.0019)], "error against each peer's", False),
        ([change(ONE, "unmasked", time=1 / 1.0299)], WORST, True),
        ([change(ONE, "unmasked", time=1 / 1.0301)], WORST, False),
        ([change(ONE, "unmasked", time=1 / 1.0301, l2="cold")], WORST.replace("warm", "cold"), False),
        ([change(ONE, "unmasked", time=1 / 1.0301)], BEYOND, False),
        # The same kernel's two times differ by 0.5 % in that case, up or down.
        ([change(ONE, "unmasked", time=1 / 1.034), change(ONE, "again", time=1.005)], BEYOND, True),
        ([change(ONE, "unmasked", time=1 / 1.034), change(ONE, "again", time=0.995)], BEYOND, True),
        ([change(ONE, "unmasked", time=1 / 1.036), change(ONE, "again", time=1.005)], BEYOND, False),
        ([change(ONE, "unmasked", time=1 / 1.036), change(ON_A_LATER_CASE, "again", time=1.5)], BEYOND, False),
        ([change("", "unmasked", time=1.0001)], "masked against unmasked, warm L2, geomean", True),
        ([change("", "unmasked", time=0.9999)], "masked against unmasked, warm L2, geomean", False),
        # 19 and 38 of the 399 shapes that are compared.
        ([change("397b-tp4/bf16/p16", "peer", time=0.6)], "ahead of the fastest peer, warm L2", True),
        ([change("397b-tp4/bf16/p16", "peer", time=0.6), change("397b-tp8/bf16/p16", "peer", time=0.6)], "ahead of the fastest peer, warm L2", False),
        ([change("/bf16/", "peer", time=1.301 / 1.5)], "the fastest peer's time over ours, bf16, warm L2, geomean", True),
        ([change("/bf16/", "peer", time=1.299 / 1.5)], "the fastest peer's time over ours, bf16, warm L2, geomean", False),
        ([change("/fp8_tensor/", "peer", time=1.149 / 1.5)], "the fastest peer's time over ours, fp8_tensor, warm L2, geomean", False),
    ],
)
def test_a_target_is_met_at_its_limit_and_missed_past_it(changes: list[Change], target: str, met: bool) -> None:
    assert verdicts_of(*changes)[target].met is met


def test_what_is_not_there_is_not_met() -> None:
    warm = {v.target: v for v in judge(make_results([(row, ENV) for row in made_rows() if row.l2 == "warm"]))}
    assert {v.word for name, v in warm.items() if "cold" in name} == {"not measured"}
    without = make_results([(row, ENV) for row in made_rows() if row.case != ONE])
    for target in (TIME, WORST, BEYOND, "ahead of the fastest peer, warm L2"):
        [verdict] = [v for v in judge(without) if v.target == target]
        assert (verdict.met, verdict.word) == (None, "not all measured"), target
    # One that misses decides, whatever is not there.
    slow = make_results([(row, ENV) for row in made_rows(change(ON_A_LATER_CASE, "unmasked", time=0.9)) if row.case != ONE])
    assert {v.target: v.met for v in judge(slow)}[WORST] is False


def test_a_peer_that_refuses_is_not_waited_for_and_one_that_was_not_asked_is() -> None:
    def refuse(row: DecodeRow) -> None:
        if row.backend == "flashinfer_xqa" and row.case == ONE:
            row.time_us, row.note = None, "no"

    assert verdicts_of(refuse)["ahead of the fastest peer, warm L2"].measured.startswith("100.0% of 398, 0 without a peer")
    alone = make_results([(row, ENV) for row in made_rows() if row.backend != "flashinfer_xqa"])
    assert {v.target: v.word for v in judge(alone)}["ahead of the fastest peer, warm L2"] == "not measured"


def test_a_kernel_that_failed_its_gate_is_not_replaced_by_another_of_ours() -> None:
    def fail(row: DecodeRow) -> None:
        if row.backend == "gluon_sm90" and row.case == ONE:
            row.time_us, row.rel_error, row.note = None, 0.5, "error 0.5 against the reference is above 0.01"

    found = verdicts_of(fail)
    for target in (TIME, WORST, BEYOND, "ahead of the fastest peer, warm L2"):
        assert found[target].met is None, target
    assert found["error against each peer's"].met is False
    assert "- 6 x gluon_sm90: error 0.5 against the reference is above 0.01" in report_lines(results_of(fail), [])


def test_published_figures_count_where_the_peer_was_not_timed_and_are_said_to_be_so() -> None:
    time_us = 1024 / ROOF_GBPS / 1e3 / 0.98
    fast = Published("elsewhere", [PublishedPeer("paper", "1", {ONE: time_us / 2}, {"bf16": 0.03})])
    verdict = verdicts_of(published=fast)["ahead of the fastest peer, warm L2"]
    assert verdict.measured == f"{398 / 399:.1%} of 399, 0 without a peer; the fastest is a published one in 1"
    # The same peer's own time of the run stands in its stead.
    timed = Published("elsewhere", [PublishedPeer("flashinfer_xqa", "1", {ONE: time_us / 2}, {"bf16": 0.001})])
    found = verdicts_of(published=timed)
    assert found["ahead of the fastest peer, warm L2"].measured.startswith("100.0% of 399")
    assert found["error against each peer's"].met
    exact = Published("elsewhere", [PublishedPeer("paper", "1", {ONE: 1.0}, {"bf16": 0.0019})])
    assert verdicts_of(published=exact)["error against each peer's"].met is False
    lines = report_lines(results_of(), [], timed)
    assert any("| flashinfer_xqa | published | 1 " in line and " 0.500 " in line for line in lines)
    assert any("| flashinfer_xqa | this run  | 171 " in line and " 1.500 " in line for line in lines)
    assert "- published figures, not of this run: elsewhere" in lines


def test_our_published_file_has_the_28_shapes() -> None:
    found = read_published(RESULTS.parent / "published-h200.json")
    by_name = {peer.name: peer for peer in found.peers}
    assert {name: len(peer.time_us) for name, peer in by_name.items()} == {"flash_attention_3": 28, "flashinfer_xqa": 28, "vllm_unified": 15}
    assert by_name["flashinfer_xqa"].time_us["35b-tp1/fp8_tensor/p64/q1/256x16384"] == 934.2
    assert {case for peer in found.peers for case in peer.time_us} <= {shape.name for shape in full_shapes()}
    with pytest.raises(ConfigError, match=r"has no published figures: .*; pass bench/published-h200\.json"):
        read_published(RESULTS / "decode-h200-quick.jsonl")


def test_tables_by_hand() -> None:
    slower = change("35b-tp1/bf16/p16/q1/1x1024", "unmasked", time=1 / 1.1)
    faster_peer = change("35b-tp1/bf16/p16/q1/1x1024", "peer", time=0.5)
    lines = report_lines(results_of(slower, faster_peer), [Verdict("a", "1", "2", False)])
    [group] = [line for line in lines if line.startswith("| warm | 35b-tp1  | bf16       | 16   | 1  | 19 ")]
    assert f"| {1.1 ** (1 / 19) - 1:+.2%} " in group and "| +10.0% | 1.02 " in group and "| 0.20% |" in group
    head = next(line for line in lines if line.startswith("| L2   | model"))
    assert [cell.strip() for cell in head.split("|")[-5:-1]] == ["triton/ours", "least", "flashinfer_xqa/ours", "least"]
    assert [cell.strip() for cell in group.split("|")[-5:-1]] == ["0.900", "0.900", f"{1.5 * 0.5 ** (1 / 19):.3f}", "0.750"]
    [everything] = [line for line in lines if line.startswith("| cold | all ")]
    assert "| 513 | +0.00%" in everything
    [mask] = [line for line in lines if line.startswith("| warm | 513 |") and "noise" not in line]
    assert "| +10.0% | 35b-tp1/bf16/p16/q1/1x1024 warm | 1 " in mask and "| 1  " in mask
    assert any("| triton         | this run | 171 | 0.900 " in line for line in lines)
    assert "| a      | 1     | 2        | missed |" in lines
    assert {len(line) for line in lines if line.startswith("| warm | 35b")} == {len(group)}


def test_a_floor_is_of_the_best_rate_of_all_commands_on_one_gpu() -> None:
    rows = [row for row in made_rows() if row.l2 == "warm"]
    rows[0].roof_gbps = 2 * ROOF_GBPS
    assert all(case.over_floor == pytest.approx(2 / 0.98) for case in make_results([(row, ENV) for row in rows]).cases)
    other = replace(ENV, device_id="other")
    two = make_results([(row, ENV if row.case == rows[0].case else other) for row in rows], mixed=True)
    assert all(case.over_floor == pytest.approx(1 / 0.98) for case in two.cases[1:])


def write(path: Path, rows: list[DecodeRow], env: Environment = ENV) -> Path:
    append_jsonl(path, [asdict(row) | asdict(env) for row in rows])
    return path


@pytest.fixture(name="few")
def few_rows() -> list[DecodeRow]:
    return made_rows()[:10]


def test_parts_of_a_run_are_one_and_others_are_refused(tmp_path: Path, few: list[DecodeRow]) -> None:
    first, second = write(tmp_path / "a.jsonl", few[:5]), write(tmp_path / "b.jsonl", few[5:])
    assert len(read_results([first, second]).cases) == 2
    for changed, message in (
        (replace(ENV, commit="def"), r"rows are of 2 commits \(abc, def\); choose with --run or --commit, or lay them side by side with --mixed"),
        (replace(ENV, device_id="other"), r"rows are of 2 GPUs \(NVIDIA H200 12345678, NVIDIA H200 other\)"),
        (replace(ENV, torch="2.12"), r"rows are of 2 versions"),
    ):
        path = tmp_path / "c.jsonl"
        path.unlink(missing_ok=True)
        write(path, few[5:], changed)
        with pytest.raises(ConfigError, match=message):
            read_results([first, path])
        assert len(read_results([first, path], mixed=True).cases) == 2
    both = write(tmp_path / "both.jsonl", few[:5], replace(ENV, commit="def"))
    assert [case.environment.commit for case in read_results([first, both], commit="def", run="full").cases] == ["def"]
    with pytest.raises(ConfigError, match=r"none of 10 rows is of run other and commit \(any\)"):
        read_results([first, path], run="other")


def test_a_case_that_is_there_twice_is_refused_or_the_last_counts(tmp_path: Path, few: list[DecodeRow]) -> None:
    path = write(write(tmp_path / "a.jsonl", few), [replace(row, time_us=7.0, run="later") for row in few[:5]])
    with pytest.raises(ConfigError, match=r"is there twice; choose one with --run or --commit"):
        read_results([path])
    assert [len(case.rows) for case in read_results([path], run="full").cases] == [5, 5]
    last, other = read_results([path], mixed=True).cases
    assert {row.time_us for row in last.rows} == {7.0} and 7.0 not in {row.time_us for row in other.rows}


@pytest.mark.parametrize("line", ["{}", "[1]", '{"case": "a', '{"shape": "tiny", "batch": 1}'])
def test_a_line_that_is_no_row_is_named(line: str, tmp_path: Path, few: list[DecodeRow]) -> None:
    path = write(tmp_path / "a.jsonl", few)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl line 11 is no row of bench decode"):
        read_results([path])


def test_a_case_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="case 'tiny/bf16' is none of the 513 shapes"):
        make_results([(replace(made_rows()[0], case="tiny/bf16"), ENV)])


def test_rows_of_earlier_versions_are_read() -> None:
    quick = read_results([RESULTS / "decode-h200-quick.jsonl"])
    assert len(quick.cases) == 28 and all(case.over_floor is not None and case.noise_ratio is not None for case in quick.cases)
    both_orders = RESULTS / "decode-h200-page-order.jsonl"
    with pytest.raises(ConfigError, match="2 commits"):
        read_results([both_orders])
    with pytest.raises(ConfigError, match="2 page orders"):
        read_results([both_orders], commit="5d2a334")


def test_peers_are_those_that_others_made() -> None:
    names = ("gluon_sm90", "triton", "reference", "leaky_control", "leaky", "atoll.bench.sketch:sketch", "flashinfer_xqa", "kernels:mine")
    assert [name for name in names if is_peer(name)] == ["flashinfer_xqa", "kernels:mine"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "decode-report", *map(str, arguments)])


@pytest.fixture(name="kept", scope="module")
def kept_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "full.jsonl"
    return write(path, made_rows())


def test_the_command_checks(kept: Path, tmp_path: Path) -> None:
    result = invoke(kept, "--check")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("# Decode attention: 513 shapes\n")
    slow = write(tmp_path / "slow.jsonl", made_rows(*all_three(ONE, 5.001)))
    assert invoke(slow).exit_code == 0
    assert invoke(slow, "--check").exit_code == 1


def test_the_same_rows_give_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here, so that the other tests run on a machine without it.
    from matplotlib.axes import Axes

    drawn_points = list[tuple[float, float]]()

    def scatter(axes: Any, x: list[float], y: list[float], **style: object) -> object:
        drawn_points.extend(zip(x, y, strict=True))
        return plain_scatter(axes, x, y, **style)

    plain_scatter = Axes.scatter
    monkeypatch.setattr(Axes, "scatter", scatter)
    rows = write(tmp_path / "rows.jsonl", [row for row in made_rows() if row.case.endswith("/64x1024")])
    pictures = [tmp_path / "a.svg", tmp_path / "new" / "b.svg"]
    for picture in pictures:
        assert invoke(rows, "--plot", picture).exit_code == 0
    drawn = pictures[0].read_text()
    assert drawn == pictures[1].read_text()
    assert "<svg" in drawn and "<dc:date>" not in drawn
    # Of each picture a point per shape and L2 state.
    assert len(drawn_points) == 2 * 2 * 27
    assert {round(over, 6) for _, over in drawn_points} == {round(1 / 0.98, 6)}


def test_what_is_not_all_measured_fails_the_check() -> None:
    result = invoke(RESULTS / "decode-h200-quick.jsonl", "--check")
    assert result.exit_code == 1 and "not all measured" in result.stdout


def test_a_plot_without_its_library_or_its_floor_says_what_to_do(tmp_path: Path, few: list[DecodeRow], monkeypatch: pytest.MonkeyPatch) -> None:
    floorless = make_results([(replace(row, roof_gbps=None), ENV) for row in few])
    with pytest.raises(ConfigError, match="no row has a roof, so there is no floor to plot"):
        plot_over_floor(floorless, tmp_path / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which cannot be imported: .*; install atoll\[plot\]"):
        plot_over_floor(floorless, tmp_path / "a.svg")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.jsonl")
    assert result.exit_code == 2 and "cannot be read" in result.stderr
    (tmp_path / "rows.jsonl").write_text(json.dumps({"case": 1}) + "\n")
    assert "is no row of bench decode" in invoke(tmp_path / "rows.jsonl").stderr
