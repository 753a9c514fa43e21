"""The Hopper backend around its kernel: what it refuses, its tuning, its descriptors, and caches that go to the Triton kernel."""

import importlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from atoll.errors import BackendError
from atoll.ops.attention import BatchShape, DecodeConfig, DecodeSpec, decode_attention, gluon_decode_sm90, plan_decode, triton_decode
from atoll.ops.attention.plan import BACKENDS, DecodePlan
from atoll.probe import BackendAdapter, Case, DecodeProblem, probe_case
from atoll.probe.layouts import Layout
from atoll.probe.matrix import matrix
from tests.kit.hopper import best_backend, is_hopper

SPEC = DecodeSpec(num_q_heads=16, num_kv_heads=2, head_dim=256, page_size=16, kv_format="fp8_tensor")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_format": "fp32"}, "kv_format 'fp32' has no tensor-core path"),
        ({"kv_format": "fp16"}, "q_dtype torch.bfloat16 differs from kv_format 'fp16'"),
        ({"kv_format": "bf16", "head_dim": 64}, "head_dim 64 of kv_format 'bf16' is below 128, whose halves are whole panels of swizzled memory"),
        ({"v_layout": "transposed"}, "v_layout 'transposed' is not 'plain'"),
        ({"head_dim": 32}, "head_dim 32 is not one of 64, 128, 256"),
        ({"page_size": 8}, "page_size 8 is below 16"),
        (
            {"kv_format": "bf16", "query_len": 8, "num_q_heads": 32},
            "128 query rows of 256 are too many for a program's registers, and 16-bit pages are not read twice",
        ),
    ],
)
def test_what_the_kernel_does_not_cover_is_refused_with_the_reason(options: dict[str, object], reason: str) -> None:
    assert gluon_decode_sm90.refusal(SPEC) is None
    assert gluon_decode_sm90.refusal(replace(SPEC, **options)) == reason  # type: ignore[arg-type]


def test_no_other_device_is_taken() -> None:
    with mock.patch("torch.cuda.get_device_capability", side_effect=AssertionError("asked for a GPU on a CPU")):
        assert gluon_decode_sm90.supports(SPEC, torch.device("cpu")) == "device cpu is not an NVIDIA GPU of compute capability 9.0"
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        assert gluon_decode_sm90.supports(SPEC, torch.device("cuda")) is None
    with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
        assert gluon_decode_sm90.supports(SPEC, torch.device("cuda")) is not None


def test_it_takes_most_cases_of_the_matrix_but_those_of_transposed_values() -> None:
    taken = [case for case in matrix("full") if gluon_decode_sm90.refusal(case.spec) is None]
    assert len(taken) >= 400
    specs = [case.spec for case in taken]
    for field, values in (("page_size", {16, 32, 64, 128, 1024}), ("head_dim", {64, 128, 256}), ("query_len", {1, 2, 3, 4}), ("group_size", {1, 3, 4, 8, 16})):
        assert {getattr(spec, field) for spec in specs} >= values, field


@pytest.mark.parametrize("seq_len", [1, 1000, 16384, 65536, 1 << 20])
@pytest.mark.parametrize("batch", [0, 1, 2, 16, 60, 64, 66, 67, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 1024])
def test_every_tuning_is_one_that_the_kernel_can_run(batch: int, seq_len: int, page_size: int) -> None:
    for batch_invariant, kv_format in itertools.product((False, True), ("fp8_tensor", "bf16")):
        spec = replace(SPEC, page_size=page_size, batch_invariant=batch_invariant, kv_format=kv_format)  # type: ignore[arg-type]
        cfg = gluon_decode_sm90.config(spec, BatchShape(batch, seq_len, 132))
        # Two edge tiles may be left when no copy is started any more; pages of a tile are 1, 2, 4 or 8.
        assert cfg.num_stages >= 3
        assert max(1, cfg.tile // page_size) in (1, 2, 4, 8)
        assert cfg.num_splits >= 1
        assert (cfg.tiles_per_split > 0) == batch_invariant
        assert cfg.num_stages * cfg.tile * spec.head_dim * (2 if kv_format == "fp8_tensor" else 4) < 227 * 1024


def test_fixed_splits_do_not_depend_on_the_batch() -> None:
    spec = replace(SPEC, batch_invariant=True)
    cfgs = [gluon_decode_sm90.config(spec, BatchShape(batch, seq_len, 132)) for batch, seq_len in ((1, 100), (64, 4096), (256, 65536))]
    assert len({(cfg.tile, cfg.tiles_per_split, cfg.num_warps, cfg.num_splits > 1) for cfg in cfgs}) == 1


def problem_of(layout: Layout) -> DecodeProblem:
    return Case(SPEC, (0, 5, 40), layout=layout).make()


@pytest.mark.parametrize("layout", ["page_major", "hnd", "nhd"])
def test_descriptors_say_where_pages_lie_and_are_made_once(layout: Layout) -> None:
    kv = problem_of(layout).kv
    assert gluon_decode_sm90.cache_refusal(kv) is None
    k, v = gluon_decode_sm90._descriptors(kv, 16)
    assert not isinstance(k, str)
    for descriptor, pages in ((k, kv.k), (v, kv.v)):
        assert descriptor.base.data_ptr() == pages.data_ptr()
        assert descriptor.shape == [pages.shape[0], 2, 16, 128]
        assert [2 * stride for stride in descriptor.strides[:3]] == list(pages.stride()[:3])
        assert descriptor.block_shape == [1, 1, 16, 128]
    assert gluon_decode_sm90._descriptors(kv, 16)[0] is k


def test_descriptors_do_not_follow_other_pages() -> None:
    kv = problem_of("hnd").kv
    gluon_decode_sm90._descriptors(kv, 16)
    assert replace(kv, k=kv.v).prepared == {}


def launch(layout: Layout, *, by_name: bool, config: DecodeConfig | None = None) -> mock.Mock:
    """What decode() hands to the Triton kernel for a cache of this layout."""
    problem = problem_of(layout)
    plan = plan_decode(SPEC, problem.seq_lens, problem.page_table, backend="reference")
    plan = replace(plan, backend="gluon_sm90", by_name=by_name, config=config or gluon_decode_sm90.config(SPEC, BatchShape(3, 40, 132)))
    with mock.patch.object(triton_decode, "decode") as portable:
        gluon_decode_sm90.decode(problem.q, problem.kv, plan, torch.empty_like(problem.q), torch.empty(problem.q.shape[:3]), None)
    return portable


def test_rows_on_odd_bytes_go_to_the_triton_kernel_with_the_splits_as_planned() -> None:
    portable = launch("odd", by_name=False)
    portable.assert_called_once()
    handed = portable.call_args.args[2]
    planned = gluon_decode_sm90.config(SPEC, BatchShape(3, 40, 132))
    assert (handed.config.tile, handed.config.num_splits, handed.config.tiles_per_split) == (planned.tile, planned.num_splits, planned.tiles_per_split)


def test_rows_on_odd_bytes_are_refused_where_the_backend_was_asked_for_by_name() -> None:
    with pytest.raises(BackendError, match=r"k pages of strides .* do not lie on multiples of 16 bytes; align its rows and pages, or make the plan with"):
        launch("odd", by_name=True)


def test_rows_too_far_apart_are_refused() -> None:
    kv = problem_of("hnd").kv
    far = torch.empty_strided((1, 1, 16, 256), (256, 256, 1 << 27, 1), dtype=kv.k.dtype, device="meta")
    assert gluon_decode_sm90.cache_refusal(replace(kv, k=far)) == (
        "the rows of a page in k pages of strides (256, 256, 134217728, 1) lie over more than 2147483647 elements"
    )


@pytest.mark.parametrize(
    ("spec", "backend"), [(SPEC, "triton"), (replace(SPEC, batch_invariant=True), "gluon_sm90")], ids=["another backend", "bits of a sequence alone"]
)
def test_one_launch_is_refused_where_it_cannot_be_had(spec: DecodeSpec, backend: str) -> None:
    taken = mock.patch.object(importlib.import_module(BACKENDS[backend]), "supports", return_value=None)
    with taken, pytest.raises(BackendError, match=r"cannot run a batch of 1 in one launch of num_programs 8 for this spec; use num_splits"):
        plan_decode(spec, [40], torch.zeros(1, 4, dtype=torch.int32), backend=backend, config=DecodeConfig(num_programs=8))


def test_rows_on_odd_bytes_of_one_launch_go_to_the_triton_kernel_with_a_workspace_of_its_own() -> None:
    portable = launch("odd", by_name=False, config=DecodeConfig(num_programs=4))
    handed = portable.call_args.args[2]
    assert handed.config == triton_decode.config(SPEC, BatchShape(3, handed.max_seq_len, 1))
    assert handed.partial_o.shape[:3] == (3, SPEC.num_kv_heads, handed.config.num_splits if handed.config.num_splits > 1 else 0)
    # Else it would hold itself, and its workspace after the plan is gone.
    assert handed.prepared == {}


def test_candidates_are_tunings_of_both_kinds() -> None:
    found = gluon_decode_sm90.candidates(SPEC, BatchShape(16, 16384, 132))
    assert {config.num_programs for config in found} == {0, 33, 66, 132, 264, 528}
    assert len({config.num_splits for config in found if not config.num_programs}) > 2
    # Whatever tile is the usual one.
    for batch, seq_len in ((16, 16384), (64, 4096), (256, 1024)):
        assert {config.tile for config in gluon_decode_sm90.candidates(SPEC, BatchShape(batch, seq_len, 132))} == {32, 64, 128}
    few = gluon_decode_sm90.candidates(SPEC, BatchShape(1, 100, 132))
    assert max(config.num_programs for config in few) <= 4 * SPEC.num_kv_heads  # four tiles of 32 a head
    assert {config.num_programs for config in gluon_decode_sm90.candidates(replace(SPEC, batch_invariant=True), BatchShape(16, 16384, 132))} == {0}


# Sequences of up to three groups of parts, empty ones, and ones within a program's stretch; plain decode, drafts, and drafts in two blocks of rows.
RACING = (1, 500, 4096, 0, 2000, 77)
RACES = {
    "fp8_tensor": SPEC,
    "bf16 drafts of a window": replace(SPEC, kv_format="bf16", query_len=2, window=1500, sinks=True),
    "fp8_token blocks of rows": replace(SPEC, kv_format="fp8_token", num_q_heads=32, head_dim=128, page_size=64, query_len=5),
}
# Below 0 so many splits, that another kernel merges, few and many; fewer than sequences, as many as multiprocessors and as run at a time, more
# than tiles.
NUM_PROGRAMS = (-11, -64, 3, 100, 132, 264, 1500)


def racing_plan(problem: DecodeProblem, num_programs: int) -> DecodePlan:
    """One launch of so many programs, or splits that prefetch; on another GPU the portable kernel, which is to do the same."""
    usual = gluon_decode_sm90.config(problem.spec, BatchShape(len(RACING), max(RACING), 132))
    splits = replace(usual, num_splits=-num_programs, prefetch=True)
    config = replace(usual, num_splits=1, num_programs=num_programs) if num_programs > 0 else splits
    return plan_decode(
        *(problem.spec, problem.seq_lens, problem.page_table),
        device=problem.device,
        backend=best_backend(),
        config=config if is_hopper() else None,
    )


class Racers:
    """Launches of one plan, each with outputs of its own, whose bits are compared on the device."""

    def __init__(self, problem: DecodeProblem, plan: DecodePlan, wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.problem, self.plan, self.wanted = problem, plan, wanted
        self.found = [(torch.empty_like(out), torch.empty_like(lse)) for out, lse in wanted]
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=problem.device)

    def forget(self) -> None:
        for pair in self.found:
            for x in pair:
                x.fill_(float("nan"))

    def launch(self, i: int) -> None:
        out, lse = self.found[i]
        decode_attention(self.problem.q, self.problem.kv, self.plan, out=out, lse=lse, sinks=self.problem.sinks)

    def compare(self) -> None:
        for wanted, found in zip(self.wanted, self.found, strict=True):
            for a, b in zip(wanted, found, strict=True):
                self.num_wrong += (a.view(torch.uint8) != b.view(torch.uint8)).sum()


def answers(problem: DecodeProblem, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = decode_attention(problem.q, problem.kv, plan, sinks=problem.sinks)
    torch.cuda.synchronize()
    return out, lse


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", NUM_PROGRAMS)
@pytest.mark.parametrize("name", RACES)
def test_launches_that_follow_at_once_give_the_same_bits(name: str, num_programs: int, device: torch.device) -> None:
    """3,200 launches replayed from a graph, each set up while the one before runs, beside another plan's in a second stream."""
    problem = Case(RACES[name], RACING).make(device)
    both = []
    for _ in range(2):
        plan = racing_plan(problem, num_programs)
        both.append(Racers(problem, plan, [answers(problem, plan)] * 32))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(both[0].wanted[0], both[1].wanted[0], strict=True))
    lent = torch.cuda.Stream()
    graphs = []
    for racers in both:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(len(racers.found)):
                racers.launch(i)
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(100):
        for racers, graph, stream in zip(both, graphs, (torch.cuda.current_stream(), lent), strict=True):
            with torch.cuda.stream(stream):
                racers.forget()
                graph.replay()
                racers.compare()
    torch.cuda.synchronize()
    assert [int(racers.num_wrong) for racers in both] == [0, 0]
    assert not any(racers.plan.arrivals.any() for racers in both)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", NUM_PROGRAMS)
def test_a_refill_between_launches_leaves_nothing_of_the_last(num_programs: int, device: torch.device) -> None:
    """Other lengths count at other places, and nobody waits for the device in between."""
    problem = Case(SPEC, RACING).make(device)
    lengths = [
        torch.tensor(lens, dtype=torch.int32, device=device) for lens in (RACING, (1, 0, 130, 0, 2000, 1), (0,) * len(RACING), (1, 499, 3000, 0, 64, 65))
    ]
    plan = racing_plan(problem, num_programs)
    wanted = []
    for lens in lengths:
        plan.refill(lens, problem.page_table)
        wanted.append(answers(problem, plan))
    racers = Racers(problem, plan, wanted)
    for _ in range(200):
        racers.forget()
        for i, lens in enumerate(lengths):
            plan.refill(lens, problem.page_table)
            racers.launch(i)
        racers.compare()
    assert int(racers.num_wrong) == 0
    assert not plan.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 33, 300])
def test_one_launch_takes_small_and_large_batches(num_sequences: int) -> None:
    """A thread holds one length of a batch of 32, and several of a larger one."""
    case = Case(SPEC, tuple((37 * i) % 200 for i in range(1, num_sequences + 1)))
    config = replace(gluon_decode_sm90.config(SPEC, BatchShape(num_sequences, 200, 132)), num_splits=1, num_programs=132)
    assert probe_case(BackendAdapter("gluon_sm90", config), case, device="cuda").status == ("clean" if is_hopper() else "refused")


# Tilings of large batches: of q in registers and by a warpgroup, copies by TMA and lane by lane.
TILINGS = {
    "two warps, fp8_tensor": (replace(SPEC, page_size=64), DecodeConfig(32, 1, 0, 2, 3)),
    "two warps, fp8_token, small pages": (replace(SPEC, kv_format="fp8_token"), DecodeConfig(32, 1, 0, 2, 3)),
    "two warps, bf16": (replace(SPEC, kv_format="bf16"), DecodeConfig(32, 1, 0, 2, 3)),
    "four warps, fp8_tensor": (replace(SPEC, page_size=64), DecodeConfig(64, 1, 0, 4, 3)),
    "eight warps, small pages": (SPEC, DecodeConfig(128, 1, 0, 8, 3)),
    "eight warps, fp8_token drafts": (replace(SPEC, page_size=64, kv_format="fp8_token", query_len=4), DecodeConfig(128, 1, 0, 8, 3)),
    "eight warps, fp8_token drafts, small pages": (replace(SPEC, kv_format="fp8_token", query_len=4), DecodeConfig(128, 1, 0, 8, 3)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILINGS)
def test_tilings_of_large_batches_are_clean(name: str) -> None:
    spec, config = TILINGS[name]
    case = Case(spec, (0, 4, 31, 32, 63, 64, 300, 1000))
    assert probe_case(BackendAdapter("gluon_sm90", config), case, device="cuda").status == ("clean" if is_hopper() else "refused")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in matrix("quick") if case.spec.kv_format.startswith("fp8")][::4], ids=lambda case: case.name)
def test_auto_is_clean_whatever_the_layout(case: Case) -> None:
    chosen = replace(case, layout="odd")
    assert probe_case(BackendAdapter("auto"), chosen, device="cuda").status == "clean"
    if is_hopper() and gluon_decode_sm90.refusal(case.spec) is None:
        assert probe_case(BackendAdapter("gluon_sm90"), chosen, device="cuda").status == "refused"
