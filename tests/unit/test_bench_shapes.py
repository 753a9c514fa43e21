"""The generated decode shapes: their number, the rule's totals, the lengths, and what a call costs by a count of its own."""

from collections import Counter

import pytest
import torch

from atoll.bench.shapes import DecodeShape, full_shapes, quick_shapes, select_shapes
from atoll.ops.attention import DecodeSpec
from atoll.ops.attention.costs import decode_costs, kv_row_bytes


def test_there_are_513_shapes() -> None:
    names = [shape.name for shape in full_shapes()]
    assert len(names) == 513
    assert len(set(names)) == 513


def test_totals_of_the_rule() -> None:
    shapes = full_shapes()
    assert Counter(s.heads.name for s in shapes) == {"35b-tp1": 285, "397b-tp4": 114, "397b-tp8": 114}
    assert Counter(s.kv_format for s in shapes) == {"bf16": 171, "fp8_tensor": 228, "fp8_token": 114}
    assert Counter(s.page_size for s in shapes) == {16: 171, 64: 171, 128: 171}
    assert Counter(s.query_len for s in shapes) == {1: 399, 4: 114}
    assert Counter(s.batch for s in shapes) == {1: 108, 4: 108, 16: 108, 64: 108, 256: 81}
    assert Counter(s.ctx for s in shapes) == {1024: 135, 4096: 135, 16384: 135, 65536: 108}
    assert (256, 65536) not in {(s.batch, s.ctx) for s in shapes}
    assert {(s.heads.num_kv_heads, s.heads.group_size, s.heads.head_dim) for s in shapes} == {(2, 8, 256), (1, 8, 256), (1, 4, 256)}


def test_several_drafts_are_verified_by_the_small_model_in_fp8_only() -> None:
    assert {(s.heads.name, s.kv_format) for s in full_shapes() if s.query_len == 4} == {("35b-tp1", "fp8_tensor"), ("35b-tp1", "fp8_token")}


def test_quick_shapes_are_28() -> None:
    quick = quick_shapes()
    assert len(set(quick)) == 28
    assert {(s.batch, s.ctx) for s in quick} == {(1, 1024), (1, 4096), (1, 65536), (16, 1024), (16, 16384), (64, 4096), (256, 16384)}
    assert {(s.kv_format, s.page_size) for s in quick} == {("bf16", 16), ("bf16", 64), ("fp8_tensor", 16), ("fp8_tensor", 64)}
    assert set(quick) <= set(full_shapes())


def test_select_filters_before_it_limits() -> None:
    found = select_shapes("full", name_filter="fp8_token/p128/q4", limit=3)
    assert [s.name for s in found] == [f"35b-tp1/fp8_token/p128/q4/1x{ctx}" for ctx in (1024, 4096, 16384)]
    assert select_shapes("quick", name_filter="fp8_token") == []


def test_lengths_are_seeded_and_end_within_256_of_the_context() -> None:
    shape = next(s for s in full_shapes() if (s.batch, s.ctx) == (256, 1024))
    lengths = shape.lengths(0)
    assert len(lengths) == 256
    assert 1024 - 255 <= min(lengths) < 800 < 1000 < max(lengths) <= 1024
    assert shape.lengths(0) == lengths
    assert shape.lengths(1) != lengths


@pytest.mark.parametrize("shape", quick_shapes(), ids=lambda shape: shape.name)
def test_spec_and_table_fit_the_shape(shape: DecodeShape) -> None:
    spec = shape.spec(mask_unowned_kv=False)
    assert (spec.num_kv_heads, spec.group_size, spec.head_dim, spec.page_size) == (2, 8, 256, shape.page_size)
    assert spec.mask_unowned_kv is False
    assert shape.lanes * shape.page_size == shape.ctx


def test_bytes_of_a_plain_case_by_hand() -> None:
    spec = DecodeSpec(num_q_heads=16, num_kv_heads=2, head_dim=256, page_size=16)
    rows = 1000 * 2 * 2 * 256 * 2
    q_and_out = 2 * 16 * 256 * 2
    lse, table, length = 16 * 4, 63 * 4, 4
    costs = decode_costs(spec, [1000])
    assert costs.bytes == rows + q_and_out + lse + table + length
    assert costs.flops == 2 * 2 * 16 * 256 * 1000


def test_scales_count() -> None:
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    plain = DecodeSpec(**heads, kv_format="fp8_tensor")
    scaled = DecodeSpec(**heads, kv_format="fp8_token")
    assert kv_row_bytes(scaled) - kv_row_bytes(plain) == 2 * 2 * 4
    # One scale for all of K and one for all of V, however many sequences.
    one, two = (decode_costs(plain, [64] * n).bytes for n in (1, 2))
    assert 2 * one - two == 2 * 4


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_len", [1, 3])
def test_flops_and_rows_by_counting(window: int | None, causal: bool, query_len: int) -> None:
    spec = DecodeSpec(2, 1, 16, 8, query_len=query_len, window=window, causal=causal, q_dtype=torch.float32, kv_format="fp32")
    for seq_len in (0, 1, 2, 7, 8, 9, 33):
        seen = {
            (i_t, key)
            for i_t in range(query_len)
            for key in range(seq_len)
            if (not causal or key <= seq_len - query_len + i_t) and (window is None or key > seq_len - query_len + i_t - window)
        }
        costs = decode_costs(spec, [seq_len])
        assert costs.flops == 4 * 2 * 16 * len(seen)
        pages = {key // 8 for key in range(spec.window_start(seq_len), seq_len)}
        rows = (seq_len - spec.window_start(seq_len)) * 2 * 16 * 4
        queries = query_len * 2 * (2 * 16 * 4 + 4)
        assert costs.bytes == rows + queries + 4 * (len(pages) + 1)
