"""Fills for rows that nobody owns: what to write, and where. Owned rows are never touched, but by the positive control.

A place is where a fill goes: `tail.v` is V of the unwritten rows of last pages, `left.k_scale` the K scales left of a window. Regions are
those of `cases`, parts are `k`, `v`, and for per-token fp8 `k_scale` and `v_scale`. Besides these: `gaps` (bytes of no row),
`workspace` and `output` (what the call writes before it reads).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from atoll.probe.cases import REGIONS, DecodeProblem, as_bits, row_values, set_rows

FILLS = ("0x7f", "0xff", "nan", "inf", "max", "random", "stale")
PARTS = ("k", "v", "k_scale", "v_scale")

_REPEATED_BYTE = {"zero": 0x00, "0x7f": 0x7F, "0xff": 0xFF, "nan": 0xFF, "inf": 0xFF, "max": 0x7F, "stale": 0x3C}


def fill_tensor(fill: str, tensor: torch.Tensor, seed: int = 0) -> None:
    """Overwrite a whole dense tensor."""
    as_bits(tensor).copy_(fill_bits(fill, tuple(tensor.shape), tensor.dtype, tensor.device, seed))


def fill_bits(fill: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Bit patterns, as integers of the dtype's width. `inf` and `max` alternate in sign along the first axis; fp8 has no Inf and takes NaN."""
    if fill in ("random", "stale"):
        generator = torch.Generator(device).manual_seed(seed)
        if fill == "random":
            wide = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, device=device, dtype=torch.uint8)
            return wide.view(as_bits(torch.empty(0, dtype=dtype)).dtype).reshape(shape)
        # Finite rows of the usual size, as an earlier request leaves them.
        return as_bits(torch.randn(shape, generator=generator, device=device).to(dtype))
    if fill in ("zero", "0x7f", "0xff"):
        byte = torch.full((*shape, dtype.itemsize), _REPEATED_BYTE[fill], dtype=torch.uint8, device=device)
        return byte.view(as_bits(torch.empty(0, dtype=dtype)).dtype).reshape(shape)
    is_fp8 = dtype == torch.float8_e4m3fn
    value = {"nan": torch.nan, "inf": torch.nan if is_fp8 else torch.inf, "max": torch.finfo(dtype).max}[fill]
    values = torch.full(shape, value, device=device)
    if shape and fill != "nan":
        values[1::2] *= -1
    return as_bits(values.to(dtype))


def places(problem: DecodeProblem) -> list[str]:
    """Every place of the problem's cache that is not empty."""
    found = [f"{region}.{part}" for region in REGIONS if problem.regions[region].numel() for part in parts_of(problem)]
    return found + (["gaps"] if problem.gaps is not None and bool(problem.gaps.any()) else [])


def poison(problem: DecodeProblem, fill: str, place: str, seed: int = 0) -> None:
    """Write one place of the cache."""
    if place == "gaps":
        assert problem.gaps is not None
        byte = fill_bits(fill, tuple(problem.buffer.shape), torch.uint8, problem.device, seed) if fill == "random" else _REPEATED_BYTE[fill]
        problem.buffer.copy_(torch.where(problem.gaps, byte, problem.buffer))
        return
    region, part = place.split(".")
    poison_rows(problem, problem.regions[region], part, fill, seed)


def poison_rows(problem: DecodeProblem, row_ids: torch.Tensor, part: str, fill: str, seed: int = 0) -> None:
    """Write whole rows of one part."""
    field = _required(problem, part)
    transposed = part == "v" and problem.kv.v_layout == "transposed"
    inner = (problem.spec.head_dim,) if part in ("k", "v") else ()
    bits = fill_bits(fill, (row_ids.numel(), problem.spec.num_kv_heads, *inner), field.dtype, problem.device, seed)
    set_rows(field, row_ids, problem.spec.page_size, bits, transposed=transposed)


def poison_cache(problem: DecodeProblem, fill: str, seed: int = 0) -> None:
    """Write every place of the cache at once."""
    if problem.gaps is not None:
        poison(problem, fill, "gaps", seed)
    rows = torch.cat([problem.regions[region] for region in REGIONS])
    for part in parts_of(problem):
        if rows.numel():
            poison_rows(problem, rows, part, fill, seed)


@contextmanager
def saved_rows(problem: DecodeProblem, row_ids: torch.Tensor, parts: Iterable[str]) -> Iterator[None]:
    """Put rows that somebody owns back as they were at the end."""
    size = problem.spec.page_size
    fields = [(_required(problem, part), part == "v" and problem.kv.v_layout == "transposed") for part in parts]
    before = [row_values(field, row_ids, size, transposed=transposed) for field, transposed in fields]
    try:
        yield
    finally:
        for (field, transposed), bits in zip(fields, before, strict=True):
            set_rows(field, row_ids, size, bits, transposed=transposed)


def parts_of(problem: DecodeProblem) -> list[str]:
    """The parts that a row of this cache has."""
    return [part for part in PARTS if _field(problem, part) is not None]


def _field(problem: DecodeProblem, part: str) -> torch.Tensor | None:
    """The paged tensor of a part; the one scale of `fp8_tensor` is nobody's row and so no part."""
    if part in ("k", "v"):
        return problem.kv.k if part == "k" else problem.kv.v
    if problem.spec.kv_format != "fp8_token":
        return None
    return problem.kv.k_scale if part == "k_scale" else problem.kv.v_scale


def _required(problem: DecodeProblem, part: str) -> torch.Tensor:
    field = _field(problem, part)
    assert field is not None, f"{problem.spec.kv_format} has no {part}"
    return field
