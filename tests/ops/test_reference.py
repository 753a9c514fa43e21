"""The reference backend against a second definition in fp64, and its promise: unowned rows never matter, owned NaN always does."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ops.attention import DecodeSpec, PagedKV, decode_attention, gather, plan_decode, reference
from tests.ops.oracle import FILLS, FORMATS, Cache, make_cache, naive_decode, poison_unowned, same_bits

INT_MAX = 2**31 - 1


def attend(
    spec: DecodeSpec, q: torch.Tensor, kv: PagedKV, lens: list[int], table: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode into buffers full of NaN, as a caller may hand them in."""
    plan = plan_decode(spec, lens, table, backend="reference")
    out = torch.full(q.shape, math.nan, dtype=spec.q_dtype)
    lse = torch.full(q.shape[:3], math.nan)
    return decode_attention(q, kv, plan, out=out, lse=lse, sinks=sinks)


def make_q(spec: DecodeSpec, batch: int, seed: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((batch, spec.query_len, spec.num_q_heads, spec.head_dim), generator=rng).to(spec.q_dtype)


def make_sinks(spec: DecodeSpec) -> torch.Tensor | None:
    return torch.linspace(-1.0, 2.0, spec.num_q_heads) if spec.sinks else None


@st.composite
def cases(draw: st.DrawFn) -> tuple[DecodeSpec, list[int], int]:
    num_kv_heads = draw(st.integers(1, 3))
    spec = DecodeSpec(
        num_q_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 16])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 20, 64])),
        page_size=draw(st.sampled_from([1, 2, 4, 16])),
        query_len=draw(st.integers(1, 8)),
        q_dtype=torch.float32,
        kv_format=draw(st.sampled_from(FORMATS)),
        v_layout=draw(st.sampled_from(["plain", "transposed"])),
        window=draw(st.sampled_from([None, 1, 3, 16, 100])),
        causal=draw(st.booleans()),
        sm_scale=draw(st.sampled_from([None, 0.7])),
        soft_cap=draw(st.sampled_from([None, 0.5, 30.0])),
        sinks=draw(st.booleans()),
    )
    lens = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 17, 40]), min_size=1, max_size=3))
    return spec, lens, draw(st.integers(0, 1000))


def case_cache(spec: DecodeSpec, lens: list[int], seed: int = 0) -> Cache:
    return make_cache(
        lens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        kv_format=spec.kv_format,
        v_layout=spec.v_layout,
        seed=seed,
    )


@given(cases())
@settings(max_examples=150)
def test_equals_the_second_definition(case: tuple[DecodeSpec, list[int], int]) -> None:
    spec, lens, seed = case
    cache, q, sinks = case_cache(spec, lens, seed), make_q(spec, len(lens), seed), make_sinks(spec)
    out, lse = attend(spec, q, cache.kv, lens, cache.page_table, sinks)
    want_out, want_lse = naive_decode(spec, q.double().numpy(), cache.k, cache.v, None if sinks is None else sinks.numpy())
    np.testing.assert_allclose(out.numpy(), want_out, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_rounds_once_to_the_dtype_of_q(q_dtype: torch.dtype) -> None:
    spec = DecodeSpec(4, 2, 64, 16, q_dtype=q_dtype)
    cache, q = case_cache(spec, [33]), make_q(spec, 1)
    out, _ = attend(spec, q, cache.kv, [33], cache.page_table)
    wide, _ = attend(dataclasses.replace(spec, q_dtype=torch.float32), q.float(), cache.kv, [33], cache.page_table)
    assert same_bits(out, wide.to(q_dtype))


def hostile_table(spec: DecodeSpec, cache: Cache, lens: list[int]) -> torch.Tensor:
    """The table with garbage wherever no owned row is named: past the end, and left of the window."""
    table = cache.page_table.clone()
    garbage = [-1, INT_MAX, 1, -(2**31)]
    for i_b, n in enumerate(lens):
        for lane in range(table.shape[1]):
            tokens = range(lane * spec.page_size, (lane + 1) * spec.page_size)
            first_seen = 0 if spec.window is None else n - spec.query_len - spec.window + 1
            if not any(first_seen <= t < n for t in tokens):
                table[i_b, lane] = garbage[(i_b + lane) % len(garbage)]
    return table


def differing_fills(spec: DecodeSpec, lens: list[int]) -> list[str]:
    """The fills of unowned rows that change a bit of the output or lse. Empty: the promise holds."""
    cache, q, sinks = case_cache(spec, lens), make_q(spec, len(lens)), make_sinks(spec)
    want = attend(spec, q, cache.kv, lens, cache.page_table, sinks)
    table = hostile_table(spec, cache, lens)
    differing = []
    for name, fill in FILLS.items():
        got = attend(spec, q, poison_unowned(cache, spec, lens, fill), lens, table, sinks)
        if not all(same_bits(a, b) for a, b in zip(got, want, strict=True)):
            differing.append(name)
    return differing


OWNERSHIP_LENS = [0, 1, 3, 4, 5, 17, 40]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("v_layout", ["plain", "transposed"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_unowned_rows_never_matter(kv_format: str, v_layout: str, query_len: int, window: int | None) -> None:
    spec = DecodeSpec(4, 2, 16, 4, query_len=query_len, kv_format=kv_format, v_layout=v_layout, window=window, sinks=True)
    assert differing_fills(spec, OWNERSHIP_LENS) == []


@pytest.mark.parametrize(("lens", "window"), [([3], None), ([4], None), ([12], 5)], ids=["tail", "padded lane", "left of the window"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_without_the_mask_the_same_check_fails(kv_format: str, lens: list[int], window: int | None) -> None:
    """The negative control: each edge alone, with the protection off."""
    spec = DecodeSpec(4, 2, 16, 4, kv_format=kv_format, window=window, mask_unowned_kv=False)
    assert "nan" in differing_fills(spec, lens)


@given(cases())
@settings(max_examples=60)
def test_both_flags_give_the_same_bits_on_clean_input(case: tuple[DecodeSpec, list[int], int]) -> None:
    spec, lens, seed = case
    cache, q, sinks = case_cache(spec, lens, seed), make_q(spec, len(lens)), make_sinks(spec)
    # Finite, but not zero.
    kv = poison_unowned(cache, spec, lens, lambda x: torch.full(x.shape, -3.0).to(x.dtype))
    masked = attend(spec, q, kv, lens, cache.page_table, sinks)
    unmasked = attend(dataclasses.replace(spec, mask_unowned_kv=False), q, kv, lens, cache.page_table, sinks)
    assert all(same_bits(a, b) for a, b in zip(masked, unmasked, strict=True))


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("token", [0, 4, 6, 7, 8, 9])
def test_owned_nan_reaches_exactly_its_readers(token: int, window: int | None, where: str) -> None:
    spec = DecodeSpec(4, 2, 16, 4, query_len=4, window=window)
    lens = [10, 6]
    cache, q = case_cache(spec, lens), make_q(spec, len(lens))
    clean = attend(spec, q, cache.kv, lens, cache.page_table)
    page, offset = cache.place(0, token)
    getattr(cache.kv, where)[page, 1, offset, 5] = math.nan
    out, lse = attend(spec, q, cache.kv, lens, cache.page_table)
    for i_q, position in enumerate(range(6, 10)):
        reads = token <= position and (window is None or token > position - window)
        # KV head 1 serves query heads 2 and 3. A NaN of V stays in its column, one of K spreads over the row.
        hit = torch.zeros((4, 16), dtype=torch.bool)
        hit[2:] = reads and (where == "k" or torch.arange(16) == 5)
        assert torch.equal(out[0, i_q].isnan(), hit)
        assert torch.equal(lse[0, i_q].isnan(), torch.tensor([False, False, True, True]) & reads & (where == "k"))
        assert torch.equal(out[0, i_q][~hit], clean[0][0, i_q][~hit])
    assert same_bits(out[1], clean[0][1])


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_token"])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (20, 1), (3, 2)])
def test_alone_equals_in_a_crowd(head_dim: int, page_size: int, kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DecodeSpec(3, 1, head_dim, page_size, query_len=2, kv_format=kv_format)
    lens = [37, 1, 0, 5, 64, 16, 37]
    cache, q = case_cache(spec, lens), make_q(spec, len(lens))
    crowd = attend(spec, q, cache.kv, lens, cache.page_table)
    for i_b, n in enumerate(lens):
        lanes = -(-n // page_size)
        alone = attend(spec, q[i_b : i_b + 1], cache.kv, [n], cache.page_table[i_b : i_b + 1, :lanes])
        assert all(same_bits(a, b[i_b : i_b + 1]) for a, b in zip(alone, crowd, strict=True))
    # Nor may it matter how many sequences are gathered at once.
    monkeypatch.setattr(gather, "GATHER_TOKENS", 40)
    regrouped = attend(spec, q, cache.kv, lens, cache.page_table)
    assert all(same_bits(a, b) for a, b in zip(regrouped, crowd, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_are_zero(sinks: bool) -> None:
    spec = DecodeSpec(4, 2, 16, 4, query_len=4, sinks=sinks)
    lens = [0, 2]
    cache = case_cache(spec, lens)
    out, lse = attend(spec, make_q(spec, 2), cache.kv, lens, cache.page_table, make_sinks(spec))
    # Of a sequence of 2 tokens, the first two of 4 query tokens stand before its start.
    empty = torch.tensor([[True] * 4, [True, True, False, False]])
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()
    assert (out[~empty] != 0).all()


def test_a_sink_is_one_more_key_with_value_zero() -> None:
    """A key that no query likes, at logit 0, against a sink of 0."""
    spec = DecodeSpec(2, 2, 16, 4, q_dtype=torch.float32, kv_format="fp32")
    cache, q = case_cache(spec, [9]), make_q(spec, 1)
    page, offset = cache.place(0, 3)
    cache.kv.k[page, :, offset] = 0.0
    cache.kv.v[page, :, offset] = 0.0
    with_key = attend(spec, q, cache.kv, [9], cache.page_table)
    for name in ("k", "v"):
        pages = getattr(cache.kv, name)
        for token in range(3, 8):  # close the gap that the key leaves
            (page, offset), (next_page, next_offset) = cache.place(0, token), cache.place(0, token + 1)
            pages[page, :, offset] = pages[next_page, :, next_offset]
    with_sink = attend(dataclasses.replace(spec, sinks=True), q, cache.kv, [8], cache.page_table, torch.zeros(2))
    for a, b in zip(with_sink, with_key, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("edge", ["first", "last"])
def test_the_oracle_sees_one_key_too_few(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the second definition."""
    spec = DecodeSpec(4, 2, 16, 4, q_dtype=torch.float32, window=12)
    cache, q = case_cache(spec, [40]), make_q(spec, 1)
    seen = reference.visible_rows

    def one_less(spec: DecodeSpec, seq_len: int, i_q: int) -> tuple[int, int]:
        lo, hi = seen(spec, seq_len, i_q)
        return (lo + 1, hi) if edge == "first" else (lo, hi - 1)

    monkeypatch.setattr(reference, "visible_rows", one_less)
    out, _ = attend(spec, q, cache.kv, [40], cache.page_table)
    want, _ = naive_decode(spec, q.double().numpy(), cache.k, cache.v, None)
    assert np.abs(out.numpy() - want).max() > 1e-3
