"""KV formats: which bytes hold a key or value row, and how they decode.

Knows no page and no kernel. A format names the dtype of the stored rows and where their scale lives:

=============  ==============  ==================================================
format         stored dtype    scale
=============  ==============  ==================================================
``fp32``       float32         none (reference backend only)
``bf16``       bfloat16        none
``fp16``       float16         none
``fp8_tensor`` float8_e4m3fn   one fp32 per tensor (``[1]``)
``fp8_token``  float8_e4m3fn   one fp32 per token and KV head (``[P, HKV, S]``)
=============  ==============  ==================================================

e4m3fn has no infinity; the bytes 0x7F and 0xFF are its NaNs, 448 its largest finite value.
"""

from typing import Literal, get_args

import torch

from atoll.errors import SpecError

KVFormat = Literal["fp32", "bf16", "fp16", "fp8_tensor", "fp8_token"]
KV_FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)

FP8_MAX = 448.0

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_tensor": torch.float8_e4m3fn,
    "fp8_token": torch.float8_e4m3fn,
}


def storage_dtype(kv_format: str) -> torch.dtype:
    """The dtype of the stored rows. Raises SpecError for an unknown format."""
    if kv_format not in _DTYPES:
        raise SpecError(f"kv_format {kv_format!r} is unknown; use one of {', '.join(KV_FORMATS)}")
    return _DTYPES[kv_format]


def is_fp8(kv_format: str) -> bool:
    return storage_dtype(kv_format) == torch.float8_e4m3fn
