"""Fresh rows to stored rows: saturates finite values, never turns NaN or Inf into a number. Knows no page.

What becomes of an element, in every format:

==============  =====================  =========================================
element         fp32, bf16, fp16       fp8
==============  =====================  =========================================
finite          rounded to nearest     rounded to nearest, saturated at 448 * scale
NaN             NaN                    NaN (byte 0x7F)
Inf             Inf                    NaN: e4m3fn has no infinity
==============  =====================  =========================================

A non-finite element leaves its neighbours in the row alone: the scale of `fp8_token` comes from the finite ones.
"""

import torch

from atoll.ops.quant.formats import FP8_MAX, KVFormat, is_fp8, storage_dtype

# Smallest normal fp32. A smaller scale would be flushed to zero by some devices; such a row is stored as zeros instead.
TINY = torch.finfo(torch.float32).tiny


def quantize(
    rows: torch.Tensor,  # [..., D]
    kv_format: KVFormat,
    scale: torch.Tensor | None = None,  # [1] fp32, for fp8_tensor alone
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows in the format's dtype, and for `fp8_token` the `[...]` fp32 scales that were computed for them."""
    if not is_fp8(kv_format):
        return rows.to(storage_dtype(kv_format)), None
    rows = rows.float()
    if kv_format == "fp8_tensor":
        assert scale is not None, "the scale of fp8_tensor is the caller's"
        return encode_fp8(rows, scale), None
    token_scale = row_scale(rows)
    return encode_fp8(rows, token_scale[..., None]), token_scale


def row_scale(rows: torch.Tensor) -> torch.Tensor:
    """The scale that puts a row's largest finite magnitude at 448; 1 for a row of zeros."""
    amax = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(-1)
    scale = amax / FP8_MAX
    return torch.where(scale >= TINY, scale, 1.0)


def encode_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`rows / scale` in e4m3fn: nearest even, saturated at 448; NaN and Inf become NaN."""
    saturated = (rows / scale).clamp(-FP8_MAX, FP8_MAX)  # clamp keeps NaN
    # An Inf would be 448 after the clamp, a finite lie; a quotient that overflowed is none.
    return torch.where(rows.isfinite(), saturated, torch.nan).to(torch.float8_e4m3fn)
