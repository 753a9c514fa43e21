"""The Hopper kernel's prefetch in our interpreter of Gluon: it names each program's first tile, changes no bit, and stays inside the cache."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from atoll.ops.attention import DecodeConfig, DecodePlan, DecodeSpec, gluon_decode_sm90, plan_decode
from atoll.probe import Case, DecodeProblem, ptx
from atoll.probe.cases import INT_MAX, as_bits
from atoll.probe.gluon_interpreter import gluon_interpreted
from atoll.probe.gluon_language import Program
from atoll.probe.layouts import Layout
from atoll.probe.watch import OutOfRangeError, watch, watched
from tests.kit.build import recorded_launches
from tests.kit.mutation import Edit, mutated_backend

INT_MIN = -INT_MAX - 1
ONE_SPLIT = DecodeConfig(prefetch=True)
WIDE_TILE = DecodeConfig(tile=128, prefetch=True)
THREE_SPLITS = DecodeConfig(num_splits=3, prefetch=True)
FIXED_SPLITS = DecodeConfig(num_splits=3, tiles_per_split=2, prefetch=True)


def spec(kv_format: str, page_size: int, **options: object) -> DecodeSpec:
    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 128 if kv_format == "bf16" else 64} | options
    return DecodeSpec(page_size=page_size, kv_format=kv_format, **shape)  # type: ignore[arg-type]


# Pages of a quarter of the tile, half of it, all of it and more; every program of some has a tile, and of some not.
CASES: list[tuple[Case, DecodeConfig]] = [
    (Case(spec("bf16", 16), (0, 1, 17, 150)), ONE_SPLIT),
    (Case(spec("bf16", 64, num_kv_heads=2), (63, 200), layout="hnd"), THREE_SPLITS),
    (Case(spec("bf16", 128, query_len=4, window=70), (5, 300)), ONE_SPLIT),
    (Case(spec("fp8_tensor", 16, window=100), (300, 290, 40)), THREE_SPLITS),
    (Case(spec("fp8_tensor", 64, batch_invariant=True), (0, 64, 290)), FIXED_SPLITS),
    (Case(spec("fp8_tensor", 32, query_len=5, num_q_heads=16), (70,)), ONE_SPLIT),
    (Case(spec("fp8_token", 32), (130, 40)), WIDE_TILE),
    (Case(spec("fp8_token", 128), (300, 3), own_page0=True), THREE_SPLITS),
]


def plan_of(problem: DecodeProblem, config: DecodeConfig) -> DecodePlan:
    """A plan of the Hopper kernel's, which no backend of this host makes."""
    return plan_decode(problem.spec, problem.seq_lens, problem.page_table, backend="reference", config=config)


Range = tuple[int, int]  # address, bytes


def launch(problem: DecodeProblem, plan: DecodePlan, module: ModuleType = gluon_decode_sm90) -> tuple[list[torch.Tensor], list[Range]]:
    """Bits of all that the kernel wrote, in memory of NaN, and what it prefetched. Raises OutOfRangeError where it touched anything but its buffers."""
    kv, out, lse = problem.kv, torch.full_like(problem.q, torch.nan), torch.full(problem.q.shape[:3], torch.nan)
    written = [out, lse, plan.partial_o.fill_(torch.nan), plan.partial_lse.fill_(torch.nan)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "has_dependent_launch", return_value=True))
        # Triton's, which this process would compile.
        stack.enter_context(mock.patch.object(module, "combine"))
        prefetch = stack.enter_context(mock.patch.object(watch, "check_range", wraps=watch.check_range))
        stack.enter_context(watched([problem.q, problem.buffer, kv.k_scale, kv.v_scale, plan.seq_lens, plan.page_table, *written]))
        stack.enter_context(gluon_interpreted())
        module.decode(problem.q, kv, plan, out, lse, problem.sinks)
    return [as_bits(tensor) for tensor in written], [call.args[:2] for call in prefetch.call_args_list]


def first_tiles(problem: DecodeProblem, config: DecodeConfig) -> list[Range]:
    """The rows of each program's first tile, of pages that hold an owned row, in so far as the table names pages for them.

    A program that takes its whole sequence asks for all rows that the table has: it does not wait for the length.
    """
    spec, found = problem.spec, []
    num_rows = min(spec.page_size, config.tile)
    num_lanes = problem.page_table.shape[1]
    for i_b, seq_len in enumerate(problem.seq_lens.tolist()):
        if config.num_splits == 1 and spec.window is None:
            seq_len = min(config.tile, num_lanes * spec.page_size)
        first, last = spec.window_start(seq_len) // config.tile, -(-seq_len // config.tile)
        for i_tile in range(first, last, config.tiles_per_split or max(1, -(-(last - first) // config.num_splits))):
            for row in range(i_tile * config.tile, min((i_tile + 1) * config.tile, seq_len), num_rows):
                page = int(problem.page_table[i_b, row // spec.page_size])
                if 0 <= page < problem.kv.num_pages and row + num_rows > spec.window_start(seq_len):
                    places = [pages[page, i_h, row % spec.page_size :][:num_rows] for pages in (problem.kv.k, problem.kv.v) for i_h in range(spec.num_kv_heads)]
                    found += [(rows.data_ptr(), rows.nbytes) for rows in places] * gluon_decode_sm90.row_blocks(spec)
    return found


@pytest.mark.parametrize(("case", "config"), CASES, ids=[case.name for case, _ in CASES])
def test_each_programs_first_tile_is_prefetched_and_no_bit_changes(case: Case, config: DecodeConfig) -> None:
    problem = case.make()
    with_it, ranges = launch(problem, plan_of(problem, config))
    without, nothing = launch(problem, plan_of(problem, replace(config, prefetch=False)))
    assert sorted(ranges) == sorted(first_tiles(problem, config)) != []
    assert nothing == []
    assert all(torch.equal(x, y) for x, y in zip(with_it, without, strict=True))


@contextmanager
def stale_until_the_wait(plan: DecodePlan, seq_lens: torch.Tensor, page_table: torch.Tensor) -> Iterator[None]:
    """Each program begins with these lengths and pages, and finds the plan's own when it has waited for the kernel before."""
    true = plan.seq_lens.clone(), plan.page_table.clone()
    start, step = Program.start, ptx._step

    def start_before_the_others_end(program: Program, ids: tuple[int, ...]) -> None:
        plan.seq_lens.copy_(seq_lens)
        plan.page_table.copy_(page_table)
        start(program, ids)

    def step_or_wait(statement: str, *rest: object) -> None:
        if statement == "griddepcontrol.wait":
            plan.seq_lens.copy_(true[0])
            plan.page_table.copy_(true[1])
        step(statement, *rest)  # type: ignore[arg-type]

    with mock.patch.object(Program, "start", start_before_the_others_end), mock.patch.object(ptx, "_step", step_or_wait):
        yield


# Lengths that may have been, one of them of more pages than there are kinds of ids below; none; where a window's start wraps, or the last tile; past the table.
STALE_LENS = (140, 30, 0, -1, INT_MIN, INT_MIN + 200, INT_MAX, INT_MAX - 63, 5000)


def stale_launch(
    case: Case, module: ModuleType = gluon_decode_sm90, *, stale: bool = True, config: DecodeConfig = THREE_SPLITS
) -> tuple[list[torch.Tensor], list[Range]]:
    """A batch of short sequences whose lengths and pages are of no use until the wait."""
    problem = case.make()
    plan = plan_of(problem, config)
    named = torch.tensor([problem.kv.num_pages, 1, INT_MAX, problem.kv.num_pages - 1, -1, 0, INT_MIN], dtype=torch.int32)
    page_table = named[torch.arange(plan.page_table.numel()) % len(named)].view_as(plan.page_table)
    with stale_until_the_wait(plan, torch.tensor(STALE_LENS, dtype=torch.int32), page_table) if stale else nullcontext():
        return launch(problem, plan, module)


def stale_case(page_size: int, window: int | None) -> Case:
    return Case(spec("fp8_tensor", page_size, num_q_heads=1, window=window), (3, 0, 1, 100, 3, 0, 0, 0, 0))


@pytest.mark.parametrize(("window", "config"), [(None, THREE_SPLITS), (300, THREE_SPLITS), (None, ONE_SPLIT)])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_lengths_and_pages_of_before_are_followed_inside_the_cache_alone_and_change_no_bit(page_size: int, window: int | None, config: DecodeConfig) -> None:
    case = stale_case(page_size, window)
    answer, ranges = stale_launch(case, config=config)
    expected, _ = stale_launch(case, stale=False, config=config)
    assert all(torch.equal(x, y) for x, y in zip(answer, expected, strict=True))
    # Some of the pages exist, and whole stretches of them are asked for.
    assert {num_bytes for _, num_bytes in ranges} == {min(page_size, 64) * 64}


BOUNDS = {
    "pages past the last": (Edit(" & (page < num_pages)", ""), "prefetch of"),
    "pages below the first": (Edit(" & (page >= 0)", ""), "prefetch of"),
    "lanes past the table's": (Edit(" & (o_row // S < num_lanes)", ""), "load of"),
    "rows below the first": (Edit("(o_row >= 0) & (o_row < row_hi)", "o_row < row_hi"), "load of"),
    "nothing at no address": (Edit("@p cp.async", "cp.async"), "prefetch of 0 bytes at 0x"),
    "no wait": (Edit("        i_s = _dependent_launch(i_s)", "        pass"), "load of"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_taking_out_a_bound_of_the_prefetch_is_seen(name: str, tmp_path: Path) -> None:
    edit, said = BOUNDS[name]
    module = mutated_backend("gluon_sm90", "gluon_kernel_sm90.py", [edit], tmp_path)
    # The second split of so many tiles begins at a row that wraps.
    config = replace(THREE_SPLITS, tiles_per_split=1 << 25) if name == "rows below the first" else THREE_SPLITS
    # Of a window where nothing waits, since all rows of INT_MAX would take hours.
    case = stale_case(16, 300 if name == "no wait" else None)
    with pytest.raises(OutOfRangeError, match=said):
        stale_launch(case, module, config=config)


@pytest.mark.parametrize(
    ("layout", "config", "dependent", "prefetches"),
    [
        ("page_major", ONE_SPLIT, True, True),
        ("hnd", ONE_SPLIT, True, True),
        # A head's rows lie apart.
        ("nhd", ONE_SPLIT, True, False),
        ("hnd", DecodeConfig(), True, False),
        # There is no kernel before that may still run.
        ("hnd", ONE_SPLIT, False, False),
    ],
)
def test_only_dense_rows_are_prefetched_and_only_ahead_of_a_wait(layout: Layout, config: DecodeConfig, dependent: bool, prefetches: bool) -> None:
    problem = Case(spec("fp8_tensor", 16, num_kv_heads=2), (40,), layout=layout).make()
    plan = plan_of(problem, config)
    with recorded_launches((gluon_decode_sm90, "decode_hopper_kernel")) as launches, mock.patch.object(gluon_decode_sm90, "has_dependent_launch") as has:
        has.return_value = dependent
        gluon_decode_sm90.decode(problem.q, problem.kv, plan, torch.empty_like(problem.q), torch.empty(problem.q.shape[:3]), None)
    assert [recorded.arguments["PREFETCH"] for recorded in launches] == [prefetches]
