"""The pool's bytes: fills decode as they claim in every format, page operations touch their pages only, and no fill changes what attention returns."""

import math

import pytest
import torch

from atoll.errors import ConfigError, PoolCorruptError, PoolError
from atoll.kv import FILLS, PageLayout, PagePool, num_pages_for_bytes
from atoll.kv.fills import Fill
from atoll.ops.attention import DecodeSpec, append_kv, check_kv, decode_attention, plan_decode
from atoll.ops.attention.spec import PagedKV
from atoll.ops.quant.formats import KV_FORMATS, KVFormat, is_fp8

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E4M3_MAX = 448.0


def make_pool(kv_format: KVFormat = "bf16", fill: Fill = "zero", *, num_pages: int = 6, device: str = "cpu", seed: int = 0) -> PagePool:
    return PagePool(PageLayout(2, 3, 24, 4, kv_format), num_pages, device, fill, seed=seed)


def rows_and_scales(pool: PagePool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every layer's rows, and every layer's scales that live in pages, as fp32."""
    layers = [pool.layer_kv(layer) for layer in range(pool.layout.num_layers)]
    rows = [pages.float() for kv in layers for pages in (kv.k, kv.v)]
    scales = [scale for kv in layers for scale in (kv.k_scale, kv.v_scale) if scale is not None and scale.dim() == 3]
    return rows, scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nan_fill_is_nan_in_every_row_and_scale_of_every_page(kv_format: KVFormat, device: str) -> None:
    pool = make_pool(kv_format, "nan", device=device)
    rows, scales = rows_and_scales(pool)
    assert len(scales) == (4 if kv_format == "fp8_token" else 0)
    for field in rows + scales:
        assert field.shape[0] == 6
        assert bool(field.isnan().all())
    assert bool((pool.buffer == 0xFF).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("fill", "value"), [("zero", 0.0), ("inf", math.inf), ("max", None)])
def test_value_fills_hold_their_value_in_every_row_and_scale(kv_format: KVFormat, fill: Fill, value: float | None, device: str) -> None:
    pool = make_pool(kv_format, fill, device=device)
    rows, scales = rows_and_scales(pool)
    largest = torch.finfo(pool.layer_kv(0).k.dtype).max
    row_value = largest if value is None or (math.isinf(value) and is_fp8(kv_format)) else value
    scale_value = torch.finfo(torch.float32).max if value is None else value
    for field in rows:
        assert bool((field == row_value).all())
    for field in scales:
        assert bool((field == scale_value).all())


def test_fp8_rows_at_their_largest_are_448() -> None:
    rows, _ = rows_and_scales(make_pool("fp8_tensor", "max"))
    assert all(bool((field == E4M3_MAX).all()) for field in rows)


@pytest.mark.parametrize(("kv_format", "is_nan"), [("fp8_tensor", True), ("fp8_token", True), ("fp16", True), ("bf16", False), ("fp32", False)])
def test_0x7f_bytes_decode_as_documented(kv_format: KVFormat, is_nan: bool) -> None:
    pool = make_pool(kv_format, "0x7f")
    rows, scales = rows_and_scales(pool)
    for field in rows:
        assert bool(field.isnan().all()) == is_nan
        assert is_nan or bool((field > 3.3e38).all())
    assert all(bool((field > 3.3e38).all()) for field in scales)
    assert bool((pool.buffer == 0x7F).all())


@pytest.mark.parametrize("device", DEVICES)
def test_random_fill_repeats_with_its_seed_and_uses_every_byte(device: str) -> None:
    first, same, other = (make_pool("fp8_token", "random", num_pages=40, device=device, seed=seed).buffer for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert len(first.unique()) == 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_poison_overwrites_its_pages_and_no_other(kv_format: KVFormat, fill: Fill, device: str) -> None:
    pool = make_pool(kv_format, "random", device=device)
    before = pool.buffer.clone()
    pool.poison([4, 0], fill, seed=1)
    assert torch.equal(pool.buffer[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    if fill == "random":
        assert not torch.equal(pool.buffer[4], before[4])
        assert not torch.equal(pool.buffer[0], before[0])
    else:
        assert torch.equal(pool.buffer[[4, 0]], make_pool(kv_format, fill, device=device).buffer[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_clear_zeroes_its_pages_and_no_other(device: str) -> None:
    pool = make_pool("fp8_token", "nan", device=device)
    pool.clear([5, 2])
    assert [int(page.max()) for page in pool.buffer] == [255, 255, 0, 255, 255, 0]
    pool.clear([])
    pool.poison([], "zero")
    assert [int(page.max()) for page in pool.buffer] == [255, 255, 0, 255, 255, 0]


@pytest.mark.gpu
def test_page_operations_reach_beyond_2_31_bytes(device: torch.device) -> None:
    layout = PageLayout(2, 2, 256, 1024, "fp8_token")
    pool = PagePool(layout, 5 * 2**30 // layout.page_bytes, device, "nan")
    last = pool.num_pages - 1
    pool.clear([last])
    pool.poison([last - 1], "max")
    assert int(pool.buffer[last].max()) == 0
    assert bool((pool.layer_kv(1).v[last - 1].float() == E4M3_MAX).all())
    assert int(pool.buffer[last - 2].min()) == 255


@pytest.mark.parametrize("page", [-1, 6])
def test_a_page_outside_the_pool_is_refused_before_anything_is_written(page: int) -> None:
    pool = make_pool(fill="nan")
    for write in (pool.clear, lambda pages: pool.poison(pages, "zero")):
        with pytest.raises(PoolError, match=f"page {page} is outside 0 to 5; use ids of this pool"):
            write([1, page])
    assert bool((pool.buffer == 0xFF).all())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_layer_kv_is_the_same_view_at_every_call_and_fits_the_spec(kv_format: KVFormat) -> None:
    pool = make_pool(kv_format)
    for layer in range(2):
        kv = pool.layer_kv(layer)
        assert kv is pool.layer_kv(layer)
        assert kv.k.data_ptr() == pool.buffer.data_ptr() + pool.layout.k_offset(layer)
        check_kv(DecodeSpec(3, 3, 24, 4, kv_format=kv_format), kv)
    for layer in (-1, 2):
        with pytest.raises(PoolError, match=f"layer {layer} is outside 0 to 1"):
            pool.layer_kv(layer)


def test_tensor_scales_start_at_one_and_reach_their_layer() -> None:
    pool = make_pool("fp8_tensor", "nan")
    assert pool.k_scales is not None
    assert pool.v_scales is not None
    assert pool.k_scales.tolist() == pool.v_scales.tolist() == [1.0, 1.0]
    pool.k_scales[1] = 0.5
    pool.v_scales[0] = 0.25
    scales = [(float(kv.k_scale), float(kv.v_scale)) for kv in map(pool.layer_kv, range(2)) if kv.k_scale is not None and kv.v_scale is not None]
    assert scales == [(1.0, 0.25), (0.5, 1.0)]


@pytest.mark.parametrize("kv_format", [kv_format for kv_format in KV_FORMATS if kv_format != "fp8_tensor"])
def test_only_fp8_tensor_has_tensor_scales(kv_format: KVFormat) -> None:
    pool = make_pool(kv_format)
    assert pool.k_scales is None
    assert pool.v_scales is None


def test_memory_becomes_pages() -> None:
    layout = PageLayout(2, 3, 64, 16, "bf16")
    size = layout.page_bytes
    assert [num_pages_for_bytes(layout, num_bytes) for num_bytes in (2 * size, 3 * size - 1, 3 * size)] == [2, 2, 3]
    with pytest.raises(ConfigError, match=f"{2 * size - 1} bytes hold 1 pages of {size} bytes, 2 is the least; give {2 * size} bytes or more"):
        num_pages_for_bytes(layout, 2 * size - 1)
    assert PagePool(layout, 3, "cpu").num_bytes == 3 * size


def test_a_pool_that_cannot_be_made_says_why() -> None:
    layout = PageLayout(1000, 128, 256, 1024, "fp32")
    with pytest.raises(PoolError, match=f"1000 pages of {layout.page_bytes} bytes .* cannot be allocated on cpu; use fewer pages"):
        PagePool(layout, 1000, "cpu")
    with pytest.raises(ConfigError, match="num_pages 1 is below 2"):
        PagePool(layout, 1, "cpu")
    with pytest.raises(ConfigError, match="fill 'pink' is unknown; use one of zero, nan, 0x7f, inf, max, random"):
        PagePool(layout, 4, "cpu", "pink")  # type: ignore[arg-type]


def test_check_recounts_the_books() -> None:
    pool = make_pool()
    held = pool.ledger.allocate(2)
    pool.check()
    pool.check(held)
    with pytest.raises(PoolCorruptError, match="page 2 has 1 references, its holders count 0"):
        pool.check(held[:1])


def _attend(kv_format: KVFormat, fill: Fill) -> list[torch.Tensor]:
    """Two sequences of 1 and 9 tokens written into a pool with this fill, then attended to, layer by layer."""
    generator = torch.Generator().manual_seed(0)
    pool = PagePool(PageLayout(2, 2, 16, 4, kv_format), 9, "cpu", fill)
    lens = [1, 9]
    pages = [pool.ledger.allocate(pool.layout.num_pages_for(n)) for n in lens]
    table = torch.zeros(2, 4, dtype=torch.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    slots = torch.tensor([ids[t // 4] * 4 + t % 4 for ids, n in zip(pages, lens, strict=True) for t in range(n)])
    plan = plan_decode(DecodeSpec(4, 2, 16, 4, q_dtype=torch.float32, kv_format=kv_format), lens, table, backend="reference")
    found: list[torch.Tensor] = []
    for layer in range(2):
        kv: PagedKV = pool.layer_kv(layer)
        append_kv(kv, torch.randn(10, 2, 16, generator=generator), torch.randn(10, 2, 16, generator=generator), slots)
        found += decode_attention(torch.randn(2, 1, 4, 16, generator=generator), kv, plan)
    return found


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("fill", FILLS)
def test_no_fill_changes_what_attention_returns(kv_format: KVFormat, fill: Fill) -> None:
    for got, expected in zip(_attend(kv_format, fill), _attend(kv_format, "zero"), strict=True):
        assert bool(expected.isfinite().all())
        assert torch.equal(got, expected)
