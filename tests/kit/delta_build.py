"""Recorded launches of the delta step's kernels, for ahead-of-time builds."""

from unittest import mock

from atoll.ops.delta import DeltaSpec, triton_step
from tests.kit.build import Cost, Launch, build, recorded_launches
from tests.kit.delta import StepCase


def step_launches(spec: DeltaSpec, ragged: bool, trace: bool) -> list[Launch]:
    """Both kernels as `delta_step` would launch them, for one token a sequence or, ragged, for several."""
    case = StepCase(spec, (1, 2), query_len=4 if ragged else 1, query_lens=(4, 2) if ragged else None, trace=trace, layout="slot_major")
    with recorded_launches((triton_step, "step_conv_kernel"), (triton_step, "step_delta_kernel")) as launches:
        case.make().run(triton_step.delta_step_triton)
    return launches


def step_costs(spec: DeltaSpec, ragged: bool, trace: bool, target: str, block_v: int = triton_step.BLOCK_V) -> list[Cost]:
    """What both kernels take of a target; `block_v` replaces the columns that one program holds."""
    with mock.patch.object(triton_step, "BLOCK_V", block_v):
        launches = step_launches(spec, ragged, trace)
    return [build(launch, target) for launch in launches]
