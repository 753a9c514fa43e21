"""Attention over paged K/V that reads only the rows a sequence owns: decode, prefill, append and merge."""

from atoll.ops.attention.append import append_kv
from atoll.ops.attention.decode import decode_attention
from atoll.ops.attention.merge import merge_states
from atoll.ops.attention.plan import (
    BACKENDS,
    NAMED_BACKENDS,
    BatchShape,
    DecodeConfig,
    DecodePlan,
    backend_masks_unowned,
    choose_backend,
    load_backend,
    plan_decode,
)
from atoll.ops.attention.prefill import prefill_attention
from atoll.ops.attention.spec import DecodeSpec, PagedKV, check_kv

__all__ = [
    "BACKENDS",
    "NAMED_BACKENDS",
    "BatchShape",
    "DecodeConfig",
    "DecodePlan",
    "DecodeSpec",
    "PagedKV",
    "append_kv",
    "backend_masks_unowned",
    "check_kv",
    "choose_backend",
    "decode_attention",
    "load_backend",
    "merge_states",
    "plan_decode",
    "prefill_attention",
]
