"""The 256 bytes of e4m3fn: what each decodes to, by this module's own arithmetic."""

import functools
import math

import torch

_EXPONENT_BIAS = 7
_MANTISSA_BITS = 3
_NAN_MAGNITUDE = 0x7F  # all exponent and mantissa bits set; there is no infinity


def decode_e4m3fn(byte: int) -> float:
    """The real number that one byte stands for: sign, 4 exponent bits (bias 7), 3 mantissa bits."""
    magnitude = byte & 0x7F
    sign = -1.0 if byte & 0x80 else 1.0
    if magnitude == _NAN_MAGNITUDE:
        return math.nan
    exponent, mantissa = magnitude >> _MANTISSA_BITS, magnitude & 0x7
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - _EXPONENT_BIAS - _MANTISSA_BITS)
    return sign * math.ldexp(8 + mantissa, exponent - _EXPONENT_BIAS - _MANTISSA_BITS)


@functools.cache
def e4m3fn_table(device: torch.device) -> torch.Tensor:
    """`decode_e4m3fn` of every byte, `[256]` fp32. Shared: never write to it."""
    return torch.tensor([decode_e4m3fn(byte) for byte in range(256)], dtype=torch.float32, device=device)
