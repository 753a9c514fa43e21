"""A program: the append kernel under Triton's interpreter against PyTorch, on every hostile case.

    TRITON_INTERPRET=1 python -m tests.ops.interpreted_append

prints as JSON how many cases there were, which of them differ and in what, and the formats in which a kernel that launders NaN was caught.
A program of its own, since Triton reads that variable once, when it is imported.
"""

import json
import sys

import torch
import triton
import triton.language as tl

from atoll.ops.attention import triton_append
from tests.ops.append_cases import AppendCase, all_cases, differences


@triton.jit
def laundering_row(b_row, p_scale, TOKEN_SCALE: tl.constexpr, FP8_MAX: tl.constexpr, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row without its guards: tl.max and the clamp drop NaN."""
    if TOKEN_SCALE:
        b_scale = tl.div_rn(tl.max(tl.abs(b_row), axis=0), FP8_MAX)
        b_scale = tl.where(b_scale >= TINY, b_scale, 1.0)
        tl.store(p_scale, b_scale)
    else:
        b_scale = tl.load(p_scale)
    b_quotient = tl.div_rn(b_row, b_scale)
    return triton_append._encode_e4m3fn(tl.minimum(tl.maximum(b_quotient, -FP8_MAX), FP8_MAX)).to(tl.uint8)


def main() -> None:
    cases = list(all_cases(interpreted=True))
    differing = {str(case): faults for case in cases if (faults := differences(case, triton_append.append_kv_triton))}
    triton_append._quantize_row = laundering_row
    fp8 = ("fp8_tensor", "fp8_token")
    caught = [name for name in fp8 if differences(AppendCase(name, "hnd", 8, torch.bfloat16), triton_append.append_kv_triton)]
    json.dump({"cases": len(cases), "differing": differing, "laundering_caught": caught}, sys.stdout)


if __name__ == "__main__":
    main()
