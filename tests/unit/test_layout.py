"""A page's layout: fields do not overlap, are aligned and complete, and every view reads and writes the raw bytes it names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import SpecError
from atoll.kv import PageLayout
from atoll.kv.layout import FIELD_ALIGN_BYTES, SCALE_ALIGN_BYTES
from atoll.ops.attention import DecodeSpec, check_kv
from atoll.ops.quant.formats import KV_FORMATS, KVFormat, storage_dtype

GIB = 1 << 30

layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 8, 24, 64, 128, 256]),
    page_size=st.sampled_from([1, 2, 16, 32]),
    kv_format=st.sampled_from(KV_FORMATS),
    v_layout=st.sampled_from(["plain", "transposed"]),
)


def fields(layout: PageLayout) -> list[tuple[int, int, int]]:
    """Offset, length and alignment in bytes of every field of a page."""
    found = []
    for layer in range(layout.num_layers):
        found += [(offset, layout.rows_bytes, FIELD_ALIGN_BYTES) for offset in (layout.k_offset(layer), layout.v_offset(layer))]
        if layout.kv_format == "fp8_token":
            found += [(offset, layout.scales_bytes, SCALE_ALIGN_BYTES) for offset in (layout.k_scale_offset(layer), layout.v_scale_offset(layer))]
    return sorted(found)


def views(layout: PageLayout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Every view of every layer."""
    found = []
    for layer in range(layout.num_layers):
        found += [layout.k_pages(buffer, layer), layout.v_pages(buffer, layer)]
        if layout.kv_format == "fp8_token":
            found += [layout.k_scales(buffer, layer), layout.v_scales(buffer, layer)]
    return found


def times_covered(layout: PageLayout, num_pages: int = 3) -> torch.Tensor:
    """How many views reach each byte of a buffer: [P, page_bytes]."""
    buffer = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8)
    for view in views(layout, buffer):
        view.view(torch.uint8).add_(1)
    return buffer


@given(layouts)
@settings(max_examples=200)
def test_fields_are_aligned_disjoint_and_inside_the_page(layout: PageLayout) -> None:
    end = 0
    for offset, num_bytes, alignment in fields(layout):
        assert offset >= end
        assert offset % alignment == 0
        end = offset + num_bytes
    assert end <= layout.page_bytes
    assert layout.page_bytes % FIELD_ALIGN_BYTES == 0
    assert sum(num_bytes for _, num_bytes, _ in fields(layout)) + layout.padding_bytes == layout.page_bytes


@given(layouts)
@settings(max_examples=200)
def test_views_reach_every_byte_but_padding_once(layout: PageLayout) -> None:
    covered = times_covered(layout)
    assert int(covered.max()) == 1
    assert covered.sum(1, dtype=torch.int64).tolist() == [layout.page_bytes - layout.padding_bytes] * 3


def test_overlapping_views_would_be_seen() -> None:
    class Overlapping(PageLayout):
        def v_offset(self, layer: int) -> int:
            return self.k_offset(layer) + 128

    layout = Overlapping(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16)
    assert int(times_covered(layout).max()) > 1


@given(layouts)
@settings(max_examples=100)
def test_views_share_the_buffer_with_the_stride_of_a_page(layout: PageLayout) -> None:
    buffer = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    rows = (3, layout.num_kv_heads, layout.page_size, layout.head_dim)
    itemsize = storage_dtype(layout.kv_format).itemsize
    for layer in range(layout.num_layers):
        kv = layout.layer_kv(buffer, layer, *[torch.ones(1)] * 2) if layout.kv_format == "fp8_tensor" else layout.layer_kv(buffer, layer)
        assert tuple(kv.k.shape) == rows
        assert tuple(kv.v.shape) == (rows if layout.v_layout == "plain" else (*rows[:2], rows[3], rows[2]))
        for view, offset in ((kv.k, layout.k_offset(layer)), (kv.v, layout.v_offset(layer))):
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert view.data_ptr() == buffer.data_ptr() + offset
            assert view.stride(0) * itemsize == layout.page_bytes
            assert view[0].is_contiguous()
        if layout.kv_format == "fp8_token":
            assert kv.k_scale is not None
            assert kv.v_scale is not None
            for scale, offset in ((kv.k_scale, layout.k_scale_offset(layer)), (kv.v_scale, layout.v_scale_offset(layer))):
                assert tuple(scale.shape) == rows[:3]
                assert scale.dtype == torch.float32
                assert scale.data_ptr() == buffer.data_ptr() + offset
                assert scale.stride(0) * 4 == layout.page_bytes
        check_kv(DecodeSpec(rows[1], rows[1], rows[3], rows[2], kv_format=layout.kv_format, v_layout=layout.v_layout), kv)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("v_layout", ["plain", "transposed"])
def test_a_value_written_through_a_view_is_found_in_the_raw_bytes(kv_format: KVFormat, v_layout: str) -> None:
    layout = PageLayout(3, 2, 8, 4, kv_format, v_layout)  # type: ignore[arg-type]
    dtype = storage_dtype(kv_format)
    size = dtype.itemsize
    buffer = torch.zeros(5, layout.page_bytes, dtype=torch.uint8)
    page, layer, head, token, dim = 3, 1, 1, 2, 5
    layout.k_pages(buffer, layer)[page, head, token, dim] = 1.5
    if v_layout == "plain":
        layout.v_pages(buffer, layer)[page, head, token, dim] = -2.0
        v_index = (head * 4 + token) * 8 + dim
    else:
        layout.v_pages(buffer, layer)[page, head, dim, token] = -2.0
        v_index = (head * 8 + dim) * 4 + token
    expected = {layout.k_offset(layer) + ((head * 4 + token) * 8 + dim) * size: (1.5, dtype), layout.v_offset(layer) + v_index * size: (-2.0, dtype)}
    if kv_format == "fp8_token":
        layout.k_scales(buffer, layer)[page, head, token] = 0.25
        layout.v_scales(buffer, layer)[page, head, token] = 0.125
        expected[layout.k_scale_offset(layer) + (head * 4 + token) * 4] = (0.25, torch.float32)
        expected[layout.v_scale_offset(layer) + (head * 4 + token) * 4] = (0.125, torch.float32)
    for offset, (value, stored) in expected.items():
        raw = buffer[page, offset : offset + stored.itemsize]
        assert float(raw.clone().view(stored)) == value
        raw.zero_()
    assert int(buffer.count_nonzero()) == 0


def test_sizes_by_hand() -> None:
    smollm2 = PageLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, kv_format="bf16")
    assert smollm2.page_bytes == 30 * 2 * 3 * 64 * 16 * 2
    assert smollm2.padding_bytes == 0
    assert smollm2.bytes_per_token == 23040.0
    single = PageLayout(num_layers=10, num_kv_heads=2, head_dim=256, page_size=1, kv_format="fp8_token")
    # Rows 2 * 256 bytes each; scales 2 * 4 bytes, each in a span of 16; 10 * 2 * (512 + 16) = 10560 is 82.5 lines, so 83.
    assert single.page_bytes == 83 * 128
    assert single.k_scale_offset(0) == 10 * 2 * 512
    assert single.v_scale_offset(0) == 10 * 2 * 512 + 16


def test_pages_for_tokens() -> None:
    layout = PageLayout(1, 1, 64, 16)
    assert [layout.num_pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_addresses_beyond_int32_in_real_memory() -> None:
    # Never filled, so the system backs only the two pages that are touched.
    layout = PageLayout(2, 2, 256, 1024, "fp8_token")
    num_pages = 3 * GIB // layout.page_bytes
    buffer = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8)
    last = num_pages - 1
    k = layout.k_pages(buffer, 1)
    assert last * k.stride(0) > 2**31
    assert k[last].data_ptr() - buffer.data_ptr() == last * layout.page_bytes + layout.k_offset(1)
    k[last, 1, 1023, 255] = 3.0
    layout.v_scales(buffer, 1)[last, 1, 1023] = 0.5
    rows_end = layout.k_offset(1) + layout.rows_bytes
    assert float(buffer[last, rows_end - 1 : rows_end].view(torch.float8_e4m3fn)) == 3.0
    scales_end = layout.v_scale_offset(1) + layout.scales_bytes
    assert float(buffer[last, scales_end - 4 : scales_end].view(torch.float32)) == 0.5


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_strides_of_a_pool_far_beyond_any_memory(kv_format: KVFormat) -> None:
    layout = PageLayout(64, 8, 256, 1024, kv_format)
    buffer = torch.empty(1 << 20, layout.page_bytes, dtype=torch.uint8, device="meta")
    view = layout.v_pages(buffer, 63)
    last = view[(1 << 20) - 1]
    itemsize = storage_dtype(kv_format).itemsize
    assert last.storage_offset() * itemsize == ((1 << 20) - 1) * layout.page_bytes + layout.v_offset(63)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers 0 is below 1"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 is below 1"),
        ({"head_dim": 0}, "head_dim 0 is below 1"),
        ({"page_size": 0}, "page_size 0 is below 1; use a power of two from 1 to 1024"),
        ({"page_size": 24}, "page_size 24 is not a power of two; use 16 or 32"),
        ({"page_size": 2048}, "page_size 2048 is above 1024; use 1024 or less"),
        ({"kv_format": "int4"}, "kv_format 'int4' is unknown; use one of fp32, bf16"),
        ({"v_layout": "swizzled"}, "v_layout 'swizzled' is unknown; use 'plain' or 'transposed'"),
    ],
)
def test_bad_values_are_refused_with_the_words_of_the_spec(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    with pytest.raises(SpecError, match=message):
        PageLayout(**(good | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_page_is_refused(layer: int) -> None:
    layout = PageLayout(2, 2, 64, 16, "fp8_token")
    buffer = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    for view in (layout.k_pages, layout.v_pages, layout.k_scales, layout.v_scales):
        with pytest.raises(SpecError, match=f"layer {layer} is outside 0 to 1"):
            view(buffer, layer)


def test_a_buffer_of_another_layout_is_refused() -> None:
    layout = PageLayout(2, 2, 64, 16)
    width = layout.page_bytes
    buffers = [
        torch.zeros(2, width + 128, dtype=torch.uint8),
        torch.zeros(2, width, dtype=torch.int8),
        torch.zeros(2 * width, dtype=torch.uint8),
        torch.zeros(4, width, dtype=torch.uint8)[::2],
    ]
    for buffer in buffers:
        with pytest.raises(SpecError, match=rf"the layout asks for contiguous torch.uint8 of shape \[P, {width}\]"):
            layout.k_pages(buffer, 0)


def test_scales_are_asked_for_exactly_where_the_format_has_them() -> None:
    one = torch.ones(1)
    for kv_format in KV_FORMATS:
        layout = PageLayout(2, 2, 64, 16, kv_format)
        buffer = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
        if kv_format != "fp8_token":
            with pytest.raises(SpecError, match=f"kv_format '{kv_format}' keeps no scale in a page"):
                layout.k_scales(buffer, 0)
        if kv_format == "fp8_tensor":
            assert layout.layer_kv(buffer, 0, one, one).k_scale is one
            with pytest.raises(SpecError, match="v_scale is None for kv_format 'fp8_tensor'"):
                layout.layer_kv(buffer, 0, one)
        else:
            with pytest.raises(SpecError, match=f"k_scale is given for kv_format '{kv_format}'"):
                layout.layer_kv(buffer, 0, one, one)
