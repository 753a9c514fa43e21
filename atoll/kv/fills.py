"""What memory that nobody has written yet may hold: the patterns, and how a buffer of spans is filled with one; knows no page and no slot."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch

from atoll.errors import ConfigError

Fill = Literal["zero", "nan", "0x7f", "inf", "max", "random"]
FILLS: tuple[Fill, ...] = get_args(Fill)
# From a buffer [n, span_bytes] of uint8 to its typed fields, as views.
Fields = Callable[[torch.Tensor], Iterable[torch.Tensor]]

# 0xFF bytes are NaN in every format and in fp32 scales. 0x7F bytes are NaN in e4m3 and fp16, and near the largest finite value in bf16 and fp32.
_BYTE_FILLS: dict[str, int] = {"zero": 0x00, "nan": 0xFF, "0x7f": 0x7F}


def check_fill(fill: str) -> None:
    if fill not in FILLS:
        raise ConfigError(f"fill {fill!r} is unknown; use one of {', '.join(FILLS)}")


def fill_buffer(buffer: torch.Tensor, fill: Fill, fields: Fields, *, seed: int = 0) -> torch.Tensor:
    """Overwrite all of `buffer` [n, span_bytes] uint8 with a pattern; returns it.

    - ``zero``, ``nan``, ``0x7f``: every byte 0x00, 0xFF, 0x7F
    - ``inf``: every field is +inf; e4m3 has none, it holds 448
    - ``max``: every field is the largest finite value of its dtype
    - ``random``: random bytes, the same for the same seed and device

    Raises ConfigError for an unknown fill.
    """
    check_fill(fill)
    if fill == "random":
        return buffer.random_(0, 256, generator=torch.Generator(buffer.device).manual_seed(seed))
    return buffer.copy_(_make_span(buffer, fill, fields))


def _make_span(like: torch.Tensor, fill: Fill, fields: Fields) -> torch.Tensor:
    """One span full of a pattern: [1, span_bytes] uint8."""
    span = torch.full((1, like.shape[1]), _BYTE_FILLS.get(fill, 0xFF), dtype=torch.uint8, device=like.device)
    if fill in _BYTE_FILLS:
        return span
    for field in fields(span):
        has_inf = field.dtype != torch.float8_e4m3fn
        field.fill_(float("inf") if fill == "inf" and has_inf else torch.finfo(field.dtype).max)
    return span
