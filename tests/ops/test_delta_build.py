"""The delta step's kernels still build for Hopper and for AMD, and none spills; no GPU is needed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch

from atoll.ops.delta import DeltaSpec
from tests.kit.build import TARGETS, Cost
from tests.kit.delta_build import step_costs
from tests.kit.workers import compiling_pool

# Spec, several tokens a sequence, trace.
VARIANTS: dict[str, tuple[DeltaSpec, bool, bool]] = {
    "d128 bf16": (DeltaSpec(16, 32, 128, 128, 4, torch.bfloat16), False, False),
    "d128 bf16 ragged trace": (DeltaSpec(16, 32, 128, 128, 4, torch.bfloat16), True, True),
    "d256 fp16 ragged": (DeltaSpec(2, 2, 256, 256, 4, torch.float16), True, False),
    "odd dims fp32 trace": (DeltaSpec(1, 3, 12, 40, 3, torch.float32), False, True),
}

Builds = dict[tuple[str, str], Future[list[Cost]]]


@pytest.fixture(scope="module")
def builds() -> Iterator[Builds]:
    """All builds at once, over processes in which Triton compiles and does not interpret."""
    pool = compiling_pool()
    builds = {(name, target): pool.submit(step_costs, *variant, target) for target in TARGETS for name, variant in VARIANTS.items()}
    # 256 rows of so many columns in the registers of 4 warps, which are twice as wide on AMD.
    for target, block_v in (("sm_90", 128), ("gfx942", 256)):
        builds["made to spill", target] = pool.submit(step_costs, *VARIANTS["d256 fp16 ragged"], target, block_v=block_v)
    yield builds
    pool.close()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_builds_without_spills(name: str, target: str, builds: Builds, record_property: Callable[[str, str], None]) -> None:
    costs = builds[name, target].result()
    assert [cost.kernel for cost in costs] == ["step_conv_kernel", "step_delta_kernel"]
    for cost in costs:
        record_property(cost.kernel, f"{cost.registers} registers, {cost.spill_bytes} bytes spilled, {cost.shared_bytes} bytes shared")
        assert cost.registers > 0
    assert [cost.fault for cost in costs if cost.fault] == []


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_variant_made_to_spill_is_caught(target: str, builds: Builds) -> None:
    [_, delta] = builds["made to spill", target].result()
    assert delta.spill_bytes > 0
    assert delta.fault is not None
