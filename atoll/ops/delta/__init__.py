"""The gated delta rule over states that stay in their slots: decode step, prefill, and their plain definitions."""

from atoll.ops.delta.chunk import delta_prefill
from atoll.ops.delta.fla_chunk import refuse_fla
from atoll.ops.delta.reference import CHUNK, causal_conv, delta_chunked, delta_recurrent, gate, l2norm
from atoll.ops.delta.spec import DeltaSpec
from atoll.ops.delta.step import StepTrace, delta_step, make_trace

__all__ = [
    "CHUNK",
    "DeltaSpec",
    "StepTrace",
    "causal_conv",
    "delta_chunked",
    "delta_prefill",
    "delta_recurrent",
    "delta_step",
    "gate",
    "l2norm",
    "make_trace",
    "refuse_fla",
]
