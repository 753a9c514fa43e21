"""Formats: the byte table, rounding and saturation, and that nothing which is not finite ever becomes a number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import SpecError
from atoll.ops.quant import quantize as quantize_module
from atoll.ops.quant.bytes import decode_e4m3fn, e4m3fn_table
from atoll.ops.quant.dequantize import dequantize
from atoll.ops.quant.formats import FP8_MAX, KV_FORMATS, KVFormat, storage_dtype
from atoll.ops.quant.quantize import quantize, row_scale

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
SCALE = torch.tensor([0.25])


def round_trip(rows: torch.Tensor, kv_format: KVFormat, scale: torch.Tensor = SCALE) -> torch.Tensor:
    stored, token_scale = quantize(rows, kv_format, scale if kv_format == "fp8_tensor" else None)
    assert stored.dtype == storage_dtype(kv_format)
    if kv_format == "fp8_tensor":
        return dequantize(stored, kv_format, scale)
    return dequantize(stored, kv_format, token_scale[..., None] if token_scale is not None else None)


def test_table_equals_the_conversion_of_pytorch() -> None:
    want = ALL_BYTES.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(e4m3fn_table(torch.device("cpu")), want, rtol=0, atol=0, equal_nan=True)


def test_table_has_two_nan_bytes_and_no_infinity() -> None:
    values = [decode_e4m3fn(byte) for byte in range(256)]
    assert [byte for byte, value in enumerate(values) if not math.isfinite(value)] == [0x7F, 0xFF]
    assert max(value for value in values if math.isfinite(value)) == FP8_MAX
    assert math.copysign(1, values[0x80]) == -1


def test_every_byte_survives_the_round_trip() -> None:
    values = dequantize(ALL_BYTES, "fp8_tensor", SCALE)
    stored, _ = quantize(values, "fp8_tensor", SCALE)
    got = stored.view(torch.uint8)
    # The two NaN bytes become one.
    want = torch.where(ALL_BYTES == 0xFF, 0x7F, ALL_BYTES)
    assert torch.equal(got, want)


@given(st.floats(-500, 500, width=32))
def test_rounds_to_the_nearest_value_even_on_a_tie(value: float) -> None:
    stored, _ = quantize(torch.tensor([value]), "fp8_tensor", torch.ones(1))
    byte = int(stored.view(torch.uint8))
    distance = {b: abs(decode_e4m3fn(b) - value) for b in range(256) if b & 0x7F != 0x7F and math.copysign(1, decode_e4m3fn(b)) == math.copysign(1, value)}
    nearest = [b for b, d in distance.items() if d == min(distance.values())]
    assert byte == (nearest[0] if len(nearest) == 1 else next(b for b in nearest if b % 2 == 0))


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_finite_values_saturate(scale: float) -> None:
    """Also where the quotient itself overflows."""
    rows = torch.tensor([[3e38, -3e38, 0.0]])
    real = round_trip(rows, "fp8_tensor", torch.tensor([scale]))
    want = torch.tensor([[1.0, -1.0, 0.0]]) * FP8_MAX * scale
    torch.testing.assert_close(real, want, rtol=1e-6, atol=0)


def test_token_scale_puts_the_largest_at_448() -> None:
    rows = torch.tensor([[1.0, -7.0, 0.5], [0.0, 0.0, 0.0], [1e-42, 0.0, 0.0], [3e38, 1.0, 0.0]])
    assert row_scale(rows)[:2].tolist() == [torch.tensor(7.0).div(448).item(), 1.0]
    real = round_trip(rows, "fp8_token")
    assert real[0, 1] == pytest.approx(-7.0, rel=1e-6)
    assert torch.equal(real[1], rows[1])
    # Below what a normal fp32 scale can reach, a row is zero, not NaN.
    assert torch.equal(real[2], torch.zeros(3))
    assert real[3, 0] == pytest.approx(3e38, rel=1e-6)


def laundered(kv_format: KVFormat) -> list[str]:
    """What was lost of rows that hold NaN and Inf: which of them came back as a number, which finite neighbour was hurt."""
    faults = []
    for bad in (math.nan, math.inf, -math.inf):
        row = torch.tensor([[1.0, bad, -3.0, 0.5], [bad, bad, bad, bad], [2.0, 1.0, 0.0, -1.0]])
        real = round_trip(row, kv_format)
        finite = row.isfinite()
        if not torch.equal(real.isfinite(), finite):
            faults.append(f"{bad} became a number, or a number was lost")
        elif not torch.allclose(real[finite], row[finite], rtol=0.07):
            faults.append(f"neighbours of {bad} changed")
        elif not kv_format.startswith("fp8") and not torch.equal(real[~finite].isnan(), row[~finite].isnan()):
            faults.append(f"{bad} became another non-number")
    return faults


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nothing_is_laundered(kv_format: KVFormat) -> None:
    assert laundered(kv_format) == []


@pytest.mark.parametrize("kv_format", ["fp8_tensor", "fp8_token"])
@pytest.mark.parametrize("fault", ["fmin", "no scale guard", "saturating Inf"])
def test_the_check_sees_laundering(fault: str, kv_format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: what NaN-dropping clamps, a maximum over all elements, and a saturating conversion would do."""
    limit = torch.tensor(FP8_MAX)

    def dropping(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.fmax(torch.fmin(rows / scale, limit), -limit).to(torch.float8_e4m3fn)

    def saturating(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (rows / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

    if fault == "no scale guard":
        # A scale from all elements: of the Inf beside them, every neighbour becomes NaN.
        monkeypatch.setattr(quantize_module, "row_scale", lambda rows: rows.abs().amax(-1) / FP8_MAX)
        assert bool(laundered(kv_format)) == (kv_format == "fp8_token")
        return
    monkeypatch.setattr(quantize_module, "encode_fp8", dropping if fault == "fmin" else saturating)
    assert laundered(kv_format) != []


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_dequantize_writes_into_another_dtype_and_layout(kv_format: KVFormat) -> None:
    rows = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    stored, token_scale = quantize(rows, kv_format, SCALE)
    scale = token_scale[..., None] if token_scale is not None else SCALE if kv_format == "fp8_tensor" else None
    out = torch.full((4, 3, 8), math.nan, dtype=torch.bfloat16)
    dequantize(stored, kv_format, scale, out=out.transpose(0, 1))
    assert torch.equal(out.transpose(0, 1), dequantize(stored, kv_format, scale).bfloat16())


def test_nan_scale_is_nan_everywhere() -> None:
    assert dequantize(ALL_BYTES, "fp8_token", torch.tensor(math.nan)).isnan().all()


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"kv_format 'int8' is unknown; use one of fp32, bf16"):
        storage_dtype("int8")
