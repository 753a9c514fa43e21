"""The cases that every decode kernel must pass: formats x pages x heads x query lengths, with the rarer options dealt out over them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from atoll.errors import ConfigError
from atoll.ops.attention import DecodeSpec
from atoll.probe.cases import Case, hostile_lengths
from atoll.probe.layouts import LAYOUTS

Size = Literal["quick", "full"]

# kv_format, v_layout, q_dtype
FORMATS: tuple[tuple[str, str, torch.dtype], ...] = (
    ("bf16", "plain", torch.bfloat16),
    ("fp16", "plain", torch.float16),
    ("fp8_tensor", "plain", torch.bfloat16),
    ("fp8_tensor", "transposed", torch.bfloat16),
    ("fp8_token", "plain", torch.bfloat16),
)
# Beside the grid: the formats' rarer forms.
RARE_FORMATS: tuple[tuple[str, str, torch.dtype], ...] = (
    ("bf16", "transposed", torch.bfloat16),
    ("fp16", "transposed", torch.float16),
    ("fp8_token", "transposed", torch.bfloat16),
    ("fp8_tensor", "plain", torch.float16),
)
PAGES, RARE_PAGES = (16, 64, 128), (1, 32, 1024)
HEAD_DIMS = (64, 128, 256)
GROUPS, RARE_GROUPS = (4, 8, 16), (1, 3)
QUERY_LENS, RARE_QUERY_LENS = (1, 2, 3, 4), (5, 8)

# Dealt out over the grid in turn; their number has no factor in common with the grid's axes, so that every option meets every format.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 100},
    {"soft_cap": 30.0},
    {"sinks": True},
    {"batch_invariant": True},
    {"window": 1, "sinks": True},
    {"window": 128, "soft_cap": 50.0, "batch_invariant": True},
)


def matrix(size: Size = "full", *, short: bool = False) -> list[Case]:
    """The must-cover cases, by name distinct. `quick` meets every pair of a format and another feature; `short` drops long sequences (interpreters)."""
    if size not in ("quick", "full"):
        raise ConfigError(f"matrix size {size!r} is unknown; use 'quick' or 'full'")
    cases = list({case.name: case for case in itertools.chain(_grid(), _extras())}.values())
    chosen = cases if size == "full" else _cover(cases)
    return [replace(case, seq_lens=hostile_lengths(case.spec.page_size, short=short), seed=i) for i, case in enumerate(chosen)]


def _spec(form: tuple[str, str, torch.dtype], page_size: int, head_dim: int, group: int, query_len: int, kv_heads: int = 2, **options: Any) -> DecodeSpec:
    kv_format, v_layout, q_dtype = form
    return DecodeSpec(
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        query_len=query_len,
        q_dtype=q_dtype,
        kv_format=kv_format,  # type: ignore[arg-type]
        v_layout=v_layout,  # type: ignore[arg-type]
        **options,
    )


def _grid() -> Iterator[Case]:
    axes = itertools.product(FORMATS, PAGES, HEAD_DIMS, GROUPS, QUERY_LENS)
    for i, (form, page_size, head_dim, group, query_len) in enumerate(axes):
        # 540 cases; 7 options and a layout that moves on every 5th case, so that the two do not go in step.
        spec = _spec(form, page_size, head_dim, group, query_len, **_OPTIONS[i % len(_OPTIONS)])
        yield Case(spec, (), layout=LAYOUTS[i // 5 % len(LAYOUTS)], own_page0=i % 11 == 0, share_prefix=i % 13 == 0)


def _extras() -> Iterator[Case]:
    for i, (form, page_size, head_dim) in enumerate(itertools.product(FORMATS + RARE_FORMATS, RARE_PAGES, HEAD_DIMS)):
        options = _OPTIONS[i % len(_OPTIONS)]
        yield Case(_spec(form, page_size, head_dim, GROUPS[i % 3], 1 + i % 4, kv_heads=1, **options), (), layout=LAYOUTS[i % 4])
    for i, (form, group) in enumerate(itertools.product(FORMATS, RARE_GROUPS)):
        yield Case(_spec(form, PAGES[i % 3], HEAD_DIMS[i % 2], group, 1 + i % 2, kv_heads=3, **_OPTIONS[i % len(_OPTIONS)]), (), layout=LAYOUTS[i % 4])
    for i, (form, query_len) in enumerate(itertools.product(FORMATS + RARE_FORMATS, RARE_QUERY_LENS)):
        # Up to 128 query rows per KV head.
        yield Case(_spec(form, PAGES[i % 3], 64, 16, query_len, kv_heads=1, **_OPTIONS[i % len(_OPTIONS)]), (), layout=LAYOUTS[i % 4])
    for i, (form, query_len) in enumerate(itertools.product(FORMATS, (1, 4))):
        base = _spec(form, PAGES[i % 3], 128, 8, query_len)
        yield Case(replace(base, causal=False, window=(None, 100)[i % 2]), ())
        yield Case(replace(base, window=16, sinks=True, soft_cap=20.0), (), own_page0=True, share_prefix=True)
        # A bound far above the lengths: nearly every split is empty.
        yield Case(base, (), max_seq_len=65536)
        yield Case(replace(base, batch_invariant=True), (), max_seq_len=65536, own_page0=True)
        # Ids beyond 16 bits, and rows beyond 2^31 elements.
        yield Case(replace(base, head_dim=256, page_size=16), (), first_page_id=300_000)


def _features(case: Case) -> set[tuple[Any, Any]]:
    """The pairs that `quick` must meet: the format with each other feature."""
    spec = case.spec
    form = (spec.kv_format, spec.v_layout, spec.q_dtype)
    flags = ("window", "soft_cap", "sinks", "batch_invariant", "causal")
    values: Sequence[Any] = [
        ("page", spec.page_size),
        ("head_dim", spec.head_dim),
        ("group", spec.group_size),
        ("query_len", spec.query_len),
        ("layout", case.layout),
        ("page 0", case.own_page0),
        ("shared", case.share_prefix),
        ("empty splits", case.max_seq_len),
        ("ids", case.first_page_id),
        *((flag, getattr(spec, flag)) for flag in flags),
    ]
    return {(form, value) for value in values}


def _cover(cases: list[Case]) -> list[Case]:
    """Greedily, the fewest cases that still meet every pair of `_features`."""
    features = [_features(case) for case in cases]
    missing = set().union(*features)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(features[i] & missing))
        chosen.append(best)
        missing -= features[best]
    return [cases[i] for i in sorted(chosen)]
