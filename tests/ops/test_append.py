"""Appending rows: what is written where, what is not, and that the kernel writes the same bytes as PyTorch."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.errors import SpecError
from atoll.ops.attention import PagedKV, append_kv
from atoll.ops.attention import append as append_module
from atoll.ops.attention.gather import gather_rows
from atoll.ops.quant.formats import storage_dtype
from tests.ops.append_cases import LAYOUTS, NUM_PAGES, PAGE_SIZE, AppendCase, all_cases, differences
from tests.ops.oracle import DTYPES, FORMATS, same_bits

# Half a step of each format's mantissa, relative to the value; to the row's largest for fp8_token.
ROUNDING = {"fp32": 0.0, "bf16": 0.0, "fp16": 2**-11, "fp8_tensor": 2**-4, "fp8_token": 2**-4}


def read_back(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token slot of the pool, `[slots, HKV, D]` fp32."""
    k, v = gather_rows(kv, torch.arange(NUM_PAGES), 0, NUM_PAGES * PAGE_SIZE)
    return k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_land_in_their_slots_and_nowhere_else(kv_format: str, layout: str) -> None:
    case = AppendCase(kv_format, layout, 8, torch.bfloat16)
    kv, before = case.cache(), case.cache()
    rng = torch.Generator().manual_seed(0)
    slots = torch.tensor([9, -1, 27, 0, 3, -1])
    k, v = torch.randn((2, 6, 2, 8), generator=rng).bfloat16()
    append_kv(kv, k, v, slots)
    for rows, got, was in zip((k, v), read_back(kv), read_back(before), strict=True):
        written = slots[slots >= 0]
        want = rows[slots >= 0].float()
        bound = ROUNDING[kv_format] * (want.abs().amax(-1, keepdim=True) if kv_format == "fp8_token" else want.abs()) + (2**-10 if "fp8" in kv_format else 0)
        assert ((got[written] - want).abs() <= bound).all()
        others = [slot for slot in range(NUM_PAGES * PAGE_SIZE) if slot not in written]
        assert same_bits(got[others], was[others])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_nan_and_inf_stay_what_they_are(kv_format: str) -> None:
    case = AppendCase(kv_format, "hnd", 8, torch.bfloat16)
    kv = case.cache()
    rows = torch.ones(3, 2, 8, dtype=torch.bfloat16)
    rows[0, 0, 3], rows[1, 1, 4], rows[2] = math.nan, -math.inf, math.nan
    append_kv(kv, rows, rows, torch.tensor([0, 1, 2]))
    for got in read_back(kv):
        assert torch.equal(got[:3].isfinite(), rows.isfinite())
        assert got[1, 1, 4].isnan() if "fp8" in kv_format else got[1, 1, 4] == -math.inf


def test_token_scales_are_written_with_their_rows() -> None:
    kv = AppendCase("fp8_token", "hnd", 8, torch.bfloat16).cache()
    rows = torch.full((2, 2, 8), 7.0, dtype=torch.bfloat16)
    rows[1] = 0.0
    append_kv(kv, rows, rows * 2, torch.tensor([5, 6]))
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    torch.testing.assert_close(kv.k_scale[1, :, 1:3], torch.tensor([[7 / 448, 1.0]] * 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(kv.v_scale[1, :, 1:3], torch.tensor([[14 / 448, 1.0]] * 2), rtol=1e-6, atol=0)
    assert (kv.k_scale[1, :, [0, 3]] == 5.0).all()


def test_nothing_to_write() -> None:
    case = AppendCase("bf16", "hnd", 8, torch.bfloat16)
    kv = case.cache()
    append_kv(kv, torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), torch.zeros(0, dtype=torch.int64))
    append_kv(kv, torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), torch.tensor([-1, -1]))
    assert same_bits(kv.k, case.cache().k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots is torch.int32 .* pass int64"),
        ({"slots": torch.zeros((2, 1), dtype=torch.int64)}, r"slots is torch.int64 of shape \(2, 1\)"),
        ({"slots": torch.tensor([0, 28])}, "slot 28 is outside the pool's 0 to 27"),
        ({"slots": torch.tensor([0, -2])}, "slot -2 is outside the pool's 0 to 27"),
        ({"k": torch.zeros(3, 2, 8)}, r"k is torch.float32 of shape \(3, 2, 8\), .* of shape \(2, 2, 8\)"),
        ({"v": torch.zeros(2, 2, 8, dtype=torch.int64)}, "v is torch.int64"),
        ({"v": torch.zeros(2, 2, 8, device="meta")}, "v is on meta, the cache on cpu"),
        ({"kv": PagedKV("bf16", torch.zeros(7, 2, 4, 8), torch.zeros(7, 2, 4, 8))}, "k pages hold torch.float32"),
        ({"kv": PagedKV("fp8_token", *torch.zeros(2, 7, 2, 4, 8).to(torch.float8_e4m3fn))}, "k_scale is None"),
        ({"kv": PagedKV("bf16", *torch.zeros(2, 2, 4, 8).bfloat16())}, "with 3 dimensions"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(change: dict, message: str) -> None:
    case = AppendCase("bf16", "hnd", 8, torch.bfloat16)
    kv = case.cache()
    arguments = {"kv": kv, "k": torch.zeros(2, 2, 8), "v": torch.zeros(2, 2, 8), "slots": torch.tensor([0, 1])} | change
    with pytest.raises(SpecError, match=message):
        append_kv(**arguments)
    assert same_bits(kv.k, case.cache().k)


def test_the_interpreted_kernel_writes_what_pytorch_writes() -> None:
    """Also the negative control: a kernel whose maximum and clamp drop NaN is caught."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted_append"],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == {"cases": len(list(all_cases(interpreted=True))), "differing": {}, "laundering_caught": ["fp8_tensor", "fp8_token"]}


def test_the_comparison_sees_a_stray_write() -> None:
    """A negative control: slot -1 taken for the last slot, as an index would."""

    def wrapping(kv: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        append_module.append_kv_torch(kv, k, v, slots % (NUM_PAGES * PAGE_SIZE))

    assert differences(AppendCase("bf16", "hnd", 8, torch.bfloat16), wrapping) == ["k", "v"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(all_cases(interpreted=False)), ids=str)
def test_the_compiled_kernel_writes_what_pytorch_writes(case: AppendCase) -> None:
    assert differences(case, append_kv, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_replays_in_a_graph_with_new_slots(kv_format: str) -> None:
    case = AppendCase(kv_format, "hnd", 8, torch.bfloat16)
    kv, want = case.cache("cuda"), case.cache()
    k, v, slots = case.rows("cuda")
    live = torch.full_like(slots, -1)
    append_kv(kv, k, v, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(kv, k, v, live)
    live.copy_(slots)
    graph.replay()
    append_kv(want, *case.rows())
    assert torch.equal(kv.k.cpu().float().nan_to_num(1e9), want.k.float().nan_to_num(1e9))


@pytest.mark.gpu
def test_addresses_beyond_two_to_the_31_bytes(device: torch.device) -> None:
    """Page ids above 65,535 in a pool of 5 GB."""
    pages = torch.zeros((80_000, 1, 16, 128), dtype=torch.bfloat16, device=device)
    v_pages = torch.zeros((80_000, 1, 16, 128), dtype=torch.bfloat16, device=device)
    rows = torch.ones((2, 1, 128), dtype=torch.bfloat16, device=device)
    last = 80_000 * 16 - 1
    append_kv(PagedKV("bf16", pages, v_pages), rows, rows, torch.tensor([last, 65_536 * 16], device=device))
    assert pages.sum().item() == v_pages.sum().item() == 256
    assert (pages[79_999, 0, 15] == 1).all()
    assert (pages[65_536, 0, 0] == 1).all()


def test_formats_of_the_tests_are_those_of_the_package() -> None:
    assert {name: storage_dtype(name) for name in FORMATS} == DTYPES
