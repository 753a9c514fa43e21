"""The Triton kernels still build for Hopper and for AMD, no listed variant spills, and all fit into shared memory; no GPU is needed."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from atoll.ops.attention import DecodeSpec
from tests.kit.build import (
    SHARED_LIMITS,
    TARGETS,
    Cost,
    Launch,
    alone_launches,
    append_launches,
    balanced_launches,
    build_costs,
    decode_launches,
    gluon_launches,
    merge_launches,
    steps_before_wait,
    uncounted,
)
from tests.kit.workers import compiling_pool


def spec(kv_format: str, page_size: int, head_dim: int, group: int, query_len: int = 1, **options: object) -> DecodeSpec:
    q_dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    return DecodeSpec(2 * group, 2, head_dim, page_size, query_len, q_dtype, kv_format, **options)  # type: ignore[arg-type]


# Formats x pages smaller and not smaller than the tile x head dims x query rows (16, 32, 64, 128), and every option once.
DECODE = {
    "bf16 p16 d64 rows 16": spec("bf16", 16, 64, 4),
    "bf16 p16 d256 rows 16": spec("bf16", 16, 256, 8),
    "bf16 p64 d128 rows 64": spec("bf16", 64, 128, 16, 4),
    "bf16 p64 d256 rows 128": spec("bf16", 64, 256, 16, 8),
    "fp16 p128 d128 rows 16 options": spec("fp16", 128, 128, 8, window=128, soft_cap=30.0, sinks=True),
    "fp8_tensor p16 d256 rows 16": spec("fp8_tensor", 16, 256, 8),
    "fp8_tensor.t p64 d128 rows 32": spec("fp8_tensor", 64, 128, 8, 4, v_layout="transposed"),
    "fp8_token p16 d128 rows 16": spec("fp8_token", 16, 128, 8, window=128),
    "fp8_token p64 d256 rows 32": spec("fp8_token", 64, 256, 8, 4),
}
APPEND = {name: spec(name, 16, 128, 8) for name in ("bf16", "fp8_tensor", "fp8_token")}

# The Hopper kernel, which takes Triton some seconds for each tuning: pages below the tile and of its size, both masks, 16-bit pages, fewest and most rows of
# queries, of which a warpgroup multiplies 32 and more.
GLUON = {
    "gluon fp8_tensor p16 d256 rows 8": spec("fp8_tensor", 16, 256, 8),
    "gluon fp8_token p64 d64 rows 64 options": spec("fp8_token", 64, 64, 16, 4, window=128, soft_cap=30.0),
    "gluon fp8_tensor p64 d256 rows 128": spec("fp8_tensor", 64, 256, 16, 8),
    "gluon bf16 p64 d256 rows 32": spec("bf16", 64, 256, 8, 4),
    "gluon bf16 p64 d256 rows 8": spec("bf16", 64, 256, 8),
    "gluon fp8_tensor p64 d256 unmasked": spec("fp8_tensor", 64, 256, 8, mask_unowned_kv=False),
}

# The same for calls whose programs each find a multiprocessor of their own: one slot more, and many.
ALONE = {
    "alone fp8_tensor p64 d256 rows 8": spec("fp8_tensor", 64, 256, 8),
    "alone fp8_tensor p64 d64 rows 8": spec("fp8_tensor", 64, 64, 8),
}

# Its kernel of one launch.
ONE_LAUNCH = {
    "one launch fp8_tensor p64 d256 rows 8": spec("fp8_tensor", 64, 256, 8),
    "one launch fp8_token p16 d128 rows 16": spec("fp8_token", 16, 128, 4, 4),
}

# Warps so few that their registers do not hold 128 x 256 fp32 accumulators, and no fewer: the compilers take the longer the more they spill.
MADE_TO_SPILL = {"sm_90": 2, "gfx942": 1}

# What a program may take for two to fit: the hardware keeps 1 KiB of each for itself.
HALF_SM_BYTES = 228 * 1024 // 2 - 1024

MERGE = spec("bf16", 64, 256, 8, window=1 << 16, sinks=True)

Builds = dict[tuple[str, str], Future[list[Cost]]]


@pytest.fixture(scope="module")
def builds() -> Iterator[Builds]:
    """All builds at once, over processes in which Triton compiles and does not interpret.

    Each target has a process of its own: what Triton has once chosen for fp8 on one of AMD's, it takes for the other one too.
    """
    pools = {target: compiling_pool(workers=1) for target in TARGETS}

    def submit(launches_of: Callable[[DecodeSpec, str], list[Launch]], spec: DecodeSpec, target: str, **options: int) -> Future[list[Cost]]:
        return pools[target].submit(build_costs, launches_of, spec, target, **options)

    jobs = [(name, decode_launches, spec) for name, spec in DECODE.items()] + [(name, append_launches, spec) for name, spec in APPEND.items()]
    builds = {(name, target): submit(launches_of, spec, target) for target in TARGETS for name, launches_of, spec in jobs}
    builds |= {(name, "sm_90"): submit(gluon_launches, spec, "sm_90") for name, spec in GLUON.items()}
    builds |= {(name, "sm_90"): submit(alone_launches, spec, "sm_90") for name, spec in ALONE.items()}
    builds |= {(name, "sm_90"): submit(balanced_launches, spec, "sm_90") for name, spec in ONE_LAUNCH.items()}
    builds |= {("merge", target): submit(merge_launches, MERGE, target) for target in TARGETS}
    for target, num_warps in MADE_TO_SPILL.items():
        builds["made to spill", target] = submit(decode_launches, DECODE["bf16 p64 d256 rows 128"], target, num_warps=num_warps, num_stages=1)
    yield builds
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*DECODE, *APPEND])
def test_builds_without_spills(name: str, target: str, builds: Builds, record_property: Callable[[str, str], None]) -> None:
    costs = builds[name, target].result()
    for cost in costs:
        record_property(cost.kernel, f"{cost.registers} registers, {cost.spill_bytes} bytes spilled, {cost.shared_bytes} bytes shared")
        assert cost.registers > 0
    assert [cost.fault for cost in costs if cost.fault] == []
    kernels = {cost.kernel for cost in costs}
    assert kernels == ({"append_kv_kernel"} if name in APPEND else {"decode_split_kernel", "combine_kernel"})


@pytest.mark.parametrize("target", TARGETS)
def test_the_merge_of_many_splits_builds_without_spills(target: str, builds: Builds) -> None:
    [cost] = builds["merge", target].result()
    assert (cost.kernel, cost.fault) == ("combine_kernel", None)


@pytest.mark.parametrize("name", [*GLUON, *ONE_LAUNCH])
def test_the_hopper_kernel_builds_without_spills(name: str, builds: Builds, record_property: Callable[[str, str], None]) -> None:
    costs = builds[name, "sm_90"].result()
    for cost in costs:
        record_property(cost.kernel, f"{cost.registers} registers, {cost.spill_bytes} bytes spilled, {cost.shared_bytes} bytes shared")
    assert [cost.fault for cost in costs if cost.fault] == []
    assert {cost.kernel for cost in costs} == ({"decode_balanced_kernel"} if name in ONE_LAUNCH else {"decode_hopper_kernel", "combine_kernel"})


@pytest.mark.parametrize("name", ["gluon fp8_tensor p16 d256 rows 8", "gluon fp8_tensor p64 d256 rows 128"])
def test_two_programs_find_room_on_an_sm(name: str, builds: Builds) -> None:
    """As the tuning counts on where each has more than a few tiles."""
    assert min(cost.shared_bytes for cost in builds[name, "sm_90"].result() if cost.kernel == "decode_hopper_kernel") <= HALF_SM_BYTES


@pytest.mark.parametrize("name", ALONE)
def test_two_programs_of_a_small_call_do_not(name: str, builds: Builds) -> None:
    """They would come to share one while another idles."""
    [cost] = builds[name, "sm_90"].result()
    assert cost.fault is None
    assert cost.shared_bytes > HALF_SM_BYTES


def test_a_call_is_small_up_to_a_program_for_each_multiprocessor() -> None:
    """Two sequences of two heads in four splits."""
    for num_sms, alone in ((16, True), (15, False)):
        [launch] = alone_launches(spec("fp8_tensor", 64, 256, 8), "sm_90", num_sms)
        assert launch.arguments["ALONE"] is alone


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_what_is_counted_is_there_to_be_read(name: str, builds: Builds) -> None:
    [cost] = builds[name, "sm_90"].result()
    assert uncounted(cost.ptx) == []


@pytest.mark.parametrize(
    ("wanted", "instead", "said"),
    [
        (r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*atom\.global)", "", "before all threads have met"),
        (r"(atom\.global[^;]*;(?:(?!bar\.sync)[\s\S])*)bar\.sync\s+0;", r"\1", "before all threads know it"),
        (r"acq_rel", "relaxed", "orders nothing for other programs"),
        (r"ld\.global\.cg", "ld.global", "from this multiprocessor's own cache"),
        (r"atom\.", "", "nothing is counted"),
    ],
)
def test_a_count_that_says_too_little_is_seen(wanted: str, instead: str, said: str, builds: Builds) -> None:
    [cost] = builds[next(iter(ONE_LAUNCH)), "sm_90"].result()
    assert any(said in fault for fault in uncounted(re.sub(wanted, instead, cost.ptx)))


# A length and pages that may be old, which must not stay in this multiprocessor's own cache (.cg); and a length that the kernel before has waited for.
PREFETCH = [
    "ld.global.cg.b32 seq_lens_ptr",
    "ld.global.cg.b32 page_table_ptr",
    "cp.async.bulk.prefetch.L2.global k_ptr",
    "cp.async.bulk.prefetch.L2.global v_ptr",
]
MERGE_SETUP = ["ld.global.b32 seq_lens_ptr", "griddepcontrol.launch_dependents"]


@pytest.mark.parametrize("name", [*DECODE, *GLUON, *ONE_LAUNCH, "merge"])
def test_nothing_else_is_read_before_the_kernel_before_has_ended(name: str, builds: Builds) -> None:
    for cost in builds[name, "sm_90"].result():
        # The first tile of a whole sequence is its first, whatever the length.
        early = [MERGE_SETUP] if cost.kernel == "combine_kernel" else [PREFETCH, PREFETCH[1:]] if "prefetch" in cost.ptx else [[]]
        assert steps_before_wait(cost) in early


WAIT_LATER = (r"(griddepcontrol\.wait;)([\s\S]*?ld\.global[^;]*;)", r"\2\1")


@pytest.mark.parametrize(
    ("name", "steps", "wanted", "instead"),
    [
        ("gluon fp8_tensor p16 d256 rows 8", PREFETCH, *WAIT_LATER),
        ("gluon fp8_tensor p16 d256 rows 8", PREFETCH, r"ld\.global\.cg", "ld.global"),
        ("gluon fp8_tensor p16 d256 rows 8", PREFETCH, r"(griddepcontrol\.wait;) (griddepcontrol\.launch_dependents;)", r"\2 \1"),
        ("merge", MERGE_SETUP, *WAIT_LATER),
        ("merge", MERGE_SETUP, r"(griddepcontrol\.launch_dependents;)([^;]*)(griddepcontrol\.wait;)", r"\3\2\1"),
        ("merge", MERGE_SETUP, r"\[combine_kernel_param_5\]", "[combine_kernel_param_4]"),
    ],
)
def test_what_is_read_too_soon_is_seen(name: str, steps: list[str], wanted: str, instead: str, builds: Builds) -> None:
    cost = builds[name, "sm_90"].result()[0]
    edited, count = re.subn(wanted, instead, cost.ptx, count=1)
    assert count == 1
    assert steps_before_wait(cost) == steps != steps_before_wait(replace(cost, ptx=edited))


@pytest.mark.parametrize("target", MADE_TO_SPILL)
def test_a_variant_made_to_spill_is_caught(target: str, builds: Builds) -> None:
    [split, _] = builds["made to spill", target].result()
    assert split.spill_bytes > 0
    assert split.fault is not None
    assert f"spills {split.spill_bytes} bytes" in split.fault


def test_too_much_shared_memory_is_a_fault() -> None:
    for target, limit in SHARED_LIMITS.items():
        assert Cost("kernel", target, 64, 0, limit).fault is None
        fault = Cost("kernel", target, 64, 0, limit + 1).fault
        assert fault is not None
        assert str(limit) in fault
