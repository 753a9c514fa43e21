"""Prefill attention against the fp64 definition: every cut of a prompt, every edge of a window, and nobody else's rows."""

import math

import numpy as np
import pytest
import torch

from atoll.errors import SpecError
from atoll.ops.attention import DecodeSpec, PagedKV, prefill, prefill_attention
from atoll.ops.quant.dequantize import dequantize
from tests.ops.oracle import FILLS, FORMATS, Cache, make_cache, naive_decode, poison_unowned, same_bits

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
OPTIONS = [
    {},
    {"window": 1},
    {"window": 7},
    {"soft_cap": 2.0},
    {"sm_scale": 0.7},
    {"window": 7, "soft_cap": 2.0, "sinks": True},
    {"sinks": True},
]


def whole_prompt(n: int, kv_format: str = "fp32", v_layout: str = "plain", seed: int = 0) -> tuple[Cache, torch.Tensor]:
    cache = make_cache([n], kv_format=kv_format, v_layout=v_layout, seed=seed)
    q = torch.randn((n, 4, 16), generator=torch.Generator().manual_seed(seed + 1))
    return cache, q


def kwargs_of(options: dict) -> dict:
    return options | ({"sinks": torch.linspace(-1.0, 2.0, 4)} if options.get("sinks") else {})


def want_prompt(cache: Cache, q: torch.Tensor, options: dict) -> np.ndarray:
    """Every token of a prompt, by the definition of decode: query token t of a sequence of t + 1."""
    spec = DecodeSpec(**HEADS, **options)
    sinks = np.linspace(-1.0, 2.0, 4) if options.get("sinks") else None
    k, v = cache.k[0], cache.v[0]
    lens = range(1, len(k) + 1)
    out, _ = naive_decode(spec, q.double().numpy()[:, None], [k[:n] for n in lens], [v[:n] for n in lens], sinks)
    return out[:, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n", [1, 4, 37, 70])
def test_equals_the_definition(n: int, options: dict) -> None:
    cache, q = whole_prompt(n)
    out = prefill_attention(q, cache.kv, cache.page_table[0], n, **kwargs_of(options))
    np.testing.assert_allclose(out.numpy(), want_prompt(cache, q, options), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("v_layout", ["plain", "transposed"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_format(kv_format: str, v_layout: str) -> None:
    cache, q = whole_prompt(21, kv_format, v_layout)
    out = prefill_attention(q[9:], cache.kv, cache.page_table[0].long(), 21)
    np.testing.assert_allclose(out.numpy(), want_prompt(cache, q, {})[9:], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_rounds_once_to_the_dtype_of_q_on_a_cpu(q_dtype: torch.dtype) -> None:
    cache, q = whole_prompt(21, "bf16")
    q = q.to(q_dtype)
    out = prefill_attention(q, cache.kv, cache.page_table[0], 21)
    assert same_bits(out, prefill_attention(q.float(), cache.kv, cache.page_table[0], 21).to(q_dtype))


def differing_cuts(options: dict, n: int = 70) -> list[int]:
    """The places at which cutting a prompt in two changes a bit of its output."""
    cache, q = whole_prompt(n, "bf16")
    table, kwargs = cache.page_table[0], kwargs_of(options)
    whole = prefill_attention(q, cache.kv, table, n, **kwargs)
    parts = [
        torch.cat([prefill_attention(q[:cut], cache.kv, table, cut, **kwargs), prefill_attention(q[cut:], cache.kv, table, n, **kwargs)]) for cut in range(1, n)
    ]
    return [cut for cut, part in enumerate(parts, start=1) if not same_bits(part, whole)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunked_equals_whole_at_every_cut(options: dict) -> None:
    assert differing_cuts(options) == []


def test_the_check_sees_steps_that_follow_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: without whole tiles of one grid, matrix libraries sum in the order that each shape suggests."""
    steps = prefill._steps
    monkeypatch.setattr(prefill, "_steps", lambda first, seq_len, tile, window, fill: steps(first, seq_len, tile, window, fill=False))
    assert differing_cuts({}) != []


def test_the_oracle_sees_one_key_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a query that sees what its predecessor sees."""
    mask = prefill._Step.mask

    def late(step: prefill._Step, window: int | None, device: torch.device) -> torch.Tensor:
        seen = mask(step, window, device)
        return torch.cat([seen[:1], seen[:-1]])

    monkeypatch.setattr(prefill._Step, "mask", late)
    cache, q = whole_prompt(70)
    out = prefill_attention(q, cache.kv, cache.page_table[0], 70)
    assert np.abs(out.numpy() - want_prompt(cache, q, {})).max() > 1e-3


def differing_fills(kv_format: str, v_layout: str, n: int, window: int | None, stop: int = 13) -> list[str]:
    """The fills of rows that the last `n` of `stop` tokens do not own that change a bit. A second sequence owns the other pages."""
    lens = [stop, 6]
    cache = make_cache(lens, kv_format=kv_format, v_layout=v_layout)
    q = torch.randn((n, 4, 16), generator=torch.Generator().manual_seed(3))
    want = prefill_attention(q, cache.kv, cache.page_table[0], stop, window=window)
    # As in a decode of n tokens: owned from the left edge of the first query's window on. Of the other sequence, nothing.
    spec = DecodeSpec(**HEADS, query_len=n, window=window)
    table = cache.page_table[0].clone()
    table[-(-stop // 4) :] = -1
    return [
        name
        for name, fill in FILLS.items()
        if not same_bits(prefill_attention(q, poison_unowned(cache, spec, [stop, 0], fill), table, stop, window=window), want)
    ]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("v_layout", ["plain", "transposed"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_unowned_rows_never_matter(kv_format: str, v_layout: str, n: int, window: int | None) -> None:
    assert differing_fills(kv_format, v_layout, n, window) == []


@pytest.mark.parametrize("window", [None, 3], ids=["right", "left"])
def test_the_check_sees_whole_pages_being_read(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: zero the borders no more, so that the rows beside the owned ones are whatever the pages hold."""

    def whole_pages(kv, page_ids, start, stop, dtype):  # type: ignore[no-untyped-def]
        first, last = start // 4, -(-stop // 4)
        k, v = gather_rows(kv, page_ids, first * 4, last * 4, dtype)
        rows = slice(start - first * 4, stop - first * 4)
        # What a masked probability does to the neighbours: 0 * NaN.
        beside = torch.cat([v[:, : rows.start], v[:, rows.stop :]], dim=1)
        return k[:, rows], v[:, rows] + (beside * 0.0).sum(1, keepdim=True)

    gather_rows = prefill.gather_rows
    monkeypatch.setattr(prefill, "gather_rows", whole_pages)
    assert "nan" in differing_fills("bf16", "plain", 1, window, stop=13 if window is None else 16)


def test_owned_nan_reaches_its_readers() -> None:
    cache, q = whole_prompt(40)
    page, offset = cache.place(0, 9)
    cache.kv.v[page, 1, offset, 5] = math.nan
    out = prefill_attention(q, cache.kv, cache.page_table[0], 40)
    assert out[9:, 2:, 5].isnan().all()
    assert not out[:, :2].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 8)}, r"q has shape \(3, 4, 8\); pass \[n, HQ, 16\]"),
        ({"q": torch.zeros(3, 3, 16)}, "HQ a multiple of the cache's 2 KV heads"),
        ({"q": torch.zeros(10, 4, 16)}, "q has 10 tokens, seq_len is 9"),
        ({"q": torch.zeros(0, 4, 16)}, "q has 0 tokens"),
        ({"seq_len": 13}, "seq_len 13 needs 4 pages of 4 tokens, page_ids has 3"),
        ({"page_ids": torch.zeros(3)}, "page_ids is torch.float32"),
        ({"window": 0}, "window 0 is below 1"),
        ({"soft_cap": math.nan}, "soft_cap nan is not a positive finite number"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch.float32 of shape \(3,\); pass torch.float32 of shape \(4,\)"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta, the cache on cpu"),
    ],
)
def test_wrong_input_is_named(change: dict, message: str) -> None:
    cache = make_cache([9], spare_lanes=0)
    arguments = {"q": torch.zeros(3, 4, 16), "kv": cache.kv, "page_ids": cache.page_table[0], "seq_len": 9} | change
    with pytest.raises(SpecError, match=message):
        prefill_attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_gpu_is_as_close_as_its_dtype_allows(kv_format: str, options: dict, device: torch.device) -> None:
    cache, q = whole_prompt(70, kv_format)
    q = q.to(torch.bfloat16)
    kv = type(cache.kv)(kv_format, *(t.to(device) if t is not None else None for t in (cache.kv.k, cache.kv.v, cache.kv.k_scale, cache.kv.v_scale)))
    kwargs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in kwargs_of(options).items()}
    want = torch.from_numpy(want_prompt(cache, q.float(), options))
    # The plain computation on rows rounded to the GPU's dtype: large scores make much of that rounding.
    rounded = prefill_attention(q, rounded_cache(cache.kv), cache.page_table[0], 70, **kwargs_of(options))
    bound = 2 * (rounded.double() - want).abs().max() + 2**-7 * want.abs().max()
    for first in (0, 1, 33, 69):
        out = prefill_attention(q[first:].to(device), kv, cache.page_table[0].to(device), 70, **kwargs)
        assert (out.cpu().double() - want[first:]).abs().max() <= bound


def rounded_cache(kv: PagedKV) -> PagedKV:
    """The same rows as bf16."""

    def rows(pages: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        per_row = scale[..., None] if scale is not None and kv.kv_format == "fp8_token" else scale
        return dequantize(pages, kv.kv_format, per_row).to(torch.bfloat16)

    return PagedKV("bf16", rows(kv.k, kv.k_scale), rows(kv.v, kv.v_scale))
