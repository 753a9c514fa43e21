"""Every wrong input to decode attention: an error that names the value, the limit and the remedy, before anything is launched."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.errors import BackendError, SpecError
from atoll.ops.attention import DecodePlan, DecodeSpec, PagedKV, check_kv, decode_attention, plan_decode
from atoll.probe import Case, DecodeProblem

GOOD: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_heads", 0, "num_kv_heads 0 is below 1; give"),
        ("num_q_heads", 9, "num_q_heads 9 is not a multiple of num_kv_heads 2; "),
        ("num_q_heads", 0, "num_q_heads 0 is not a multiple of num_kv_heads 2; "),
        ("num_q_heads", 34, "group size 17 (num_q_heads 34 / num_kv_heads 2) is above 16; split"),
        ("page_size", 24, "page_size 24 is not a power of two; use 16 or 32"),
        ("page_size", 2048, "page_size 2048 is above 1024; use 1024"),
        ("page_size", 0, "page_size 0 is below 1; use"),
        ("query_len", 0, "query_len 0 is outside 1 to 8; use"),
        ("query_len", 9, "query_len 9 is outside 1 to 8; use"),
        ("head_dim", 0, "head_dim 0 is below 1; give"),
        ("q_dtype", torch.int8, "q_dtype torch.int8 is not supported; use"),
        ("kv_format", "int4", "kv_format 'int4' is unknown; use one of"),
        ("v_layout", "swizzled", "v_layout 'swizzled' is unknown; use"),
        ("window", 0, "window 0 is below 1; "),
        ("sm_scale", -1.0, "sm_scale -1.0 is not a positive finite number; "),
        ("sm_scale", float("nan"), "sm_scale nan is not a positive finite number; "),
        ("soft_cap", 0.0, "soft_cap 0.0 is not a positive finite number; "),
    ],
)
def test_spec_refuses(field: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        DecodeSpec(**(GOOD | {field: value}))


def problem(kv_format: str = "bf16", **options: Any) -> DecodeProblem:
    return Case(DecodeSpec(**(GOOD | options), kv_format=kv_format), (5, 20), layout="hnd").make()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kv_format", "change", "message"),
    [
        ("bf16", lambda kv: {"kv_format": "fp16"}, "the cache is 'fp16', the spec asks for 'bf16'; "),
        ("bf16", lambda kv: {"v_layout": "transposed"}, "the cache has 'transposed' V, the spec asks for 'plain'; "),
        ("bf16", lambda kv: {"k": kv.k[:, :1]}, "k pages have shape (10, 1, 16, 64), the spec asks for (10, 2, 16, 64) (plain V); pass"),
        ("bf16", lambda kv: {"v": kv.v.transpose(2, 3)}, "v pages have shape (10, 2, 64, 16), the spec asks for (10, 2, 16, 64) (plain V); pass"),
        ("bf16", lambda kv: {"k": kv.k.half()}, "k pages hold torch.float16, kv_format 'bf16' asks for torch.bfloat16; "),
        ("bf16", lambda kv: {"v": kv.v.transpose(2, 3).contiguous().transpose(2, 3)}, "v pages have innermost stride 16, it must be 1; "),
        ("bf16", lambda kv: {"v": kv.v.to("meta")}, "k pages are on cpu, v pages on meta; keep"),
        ("bf16", lambda kv: {"k_scale": torch.ones(1)}, "k_scale is given, but kv_format 'bf16' has no scale; pass None"),
        ("fp8_tensor", lambda kv: {"v_scale": None}, "v_scale is None, kv_format 'fp8_tensor' asks for fp32 of shape (1,); pass"),
        ("fp8_tensor", lambda kv: {"k_scale": torch.ones(2)}, "k_scale is torch.float32 of shape (2,), kv_format 'fp8_tensor' asks for torch.float32"),
        ("fp8_token", lambda kv: {"v_scale": kv.v_scale.half()}, "v_scale is torch.float16 of shape (10, 2, 16), kv_format 'fp8_token' asks for torch.float32"),
    ],
)  # fmt: skip
def test_cache_refuses(kv_format: str, change: Callable[[PagedKV], dict[str, Any]], message: str) -> None:
    good = problem(kv_format)
    check_kv(good.spec, good.kv)
    with pytest.raises(SpecError, match=re.escape(message)):
        check_kv(good.spec, replace(good.kv, **change(good.kv)))


TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("seq_lens", "page_table", "options", "message"),
    [
        ([1, 2, 3], TABLE, {}, "page_table has 2 rows, seq_lens 3; give one row"),
        ([1, -4], TABLE, {}, "seq_len -4 is below 0; use 0"),
        ([1, 49], TABLE, {}, "seq_len 49 needs 4 pages of 16 tokens, page_table has 3 columns; pass at least 4"),
        ([1, 40], TABLE, {"max_seq_len": 39}, "seq_len 40 is above max_seq_len 39; raise"),
        ([1, 2], TABLE.long(), {}, "page_table is torch.int64 of shape (2, 3); pass int32 of shape [B, MP]"),
        ([1, 2], TABLE[0], {}, "page_table is torch.int32 of shape (3,); pass int32 of shape [B, MP]"),
        (torch.tensor([1.0, 2.0]), TABLE, {}, "seq_lens is torch.float32 of shape (2,); pass int32 of shape [B]"),
        (torch.tensor([[1, 2]], dtype=torch.int32), TABLE, {}, "seq_lens is torch.int32 of shape (1, 2); pass int32 of shape [B]"),
    ],
)  # fmt: skip
def test_plan_refuses(seq_lens: Any, page_table: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        plan_decode(DecodeSpec(**GOOD), seq_lens, page_table, backend="reference", **options)


@pytest.mark.parametrize(
    ("seq_lens", "lanes", "message"),
    [
        ([1, 2, 3], 3, "refill with table [3, 3] does not fit the plan's [2, 3]; make a larger plan"),
        ([1, 2], 4, "refill with table [2, 4] does not fit the plan's [2, 3]; make a larger plan"),
        ([1, 21], 3, "seq_len 21 is above the plan's max_seq_len 20; make a larger plan"),
        ([1, 20], 1, "seq_len 20 needs 2 pages of 16 tokens, page_table has 1 columns; pass at least 2"),
    ],
)
def test_refill_refuses_and_leaves_the_plan_as_it_was(seq_lens: list[int], lanes: int, message: str) -> None:
    made = plan_decode(DecodeSpec(**GOOD), [5, 20], TABLE, backend="reference")
    with pytest.raises(SpecError, match=re.escape(message)):
        made.refill(seq_lens, torch.full((len(seq_lens), lanes), 7, dtype=torch.int32))
    assert made.seq_lens.tolist() == [5, 20]
    assert not made.page_table.any()


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"'cutlass' is unknown; use 'auto' or one of .*triton, .*reference"):
        plan_decode(DecodeSpec(**GOOD), [1, 2], TABLE, backend="cutlass")


def test_a_backend_asked_for_by_name_says_why_it_cannot() -> None:
    with pytest.raises(BackendError, match=r"triton: head_dim 80 is not one of|triton: device cpu is not a GPU"):
        plan_decode(DecodeSpec(**(GOOD | {"head_dim": 80})), [1, 2], TABLE, backend="triton")


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches seen; the backend is replaced, so that a check after the launch would show as a launch."""
    seen: list[str] = []
    stub = SimpleNamespace(decode=lambda *args: seen.append("launch"))
    monkeypatch.setattr(sys.modules[decode_attention.__module__], "load_backend", lambda name: stub)
    return seen


CALLS: list[tuple[Callable[[DecodeProblem], dict[str, Any]], str]] = [
    (lambda p: {"q": p.q[:1]}, "q is torch.bfloat16 of shape (1, 1, 8, 64), the plan asks for torch.bfloat16 of shape (2, 1, 8, 64); pass"),
    (lambda p: {"q": p.q.half()}, "q is torch.float16 of shape (2, 1, 8, 64), the plan asks for torch.bfloat16"),
    (lambda p: {"q": p.q.transpose(2, 3).contiguous().transpose(2, 3)}, "q has innermost stride 8, it must be 1; pass q.contiguous()"),
    (lambda p: {"q": p.q.to("meta")}, "q is on meta, the plan on cpu; put both on one device"),
    (lambda p: {"kv": replace(p.kv, k=p.kv.k.to("meta"), v=p.kv.v.to("meta"))}, "the cache is on meta, the plan on cpu; make the plan with device='meta'"),
    (lambda p: {"kv": replace(p.kv, kv_format="fp16")}, "the cache is 'fp16', the spec asks for 'bf16'"),
    (lambda p: {"out": torch.empty(2, 8, 64)}, "out is torch.float32 of shape (2, 8, 64), the plan asks for torch.bfloat16 of shape (2, 1, 8, 64); pass"),
    (lambda p: {"out": torch.empty(2, 1, 64, 8, dtype=torch.bfloat16).transpose(2, 3)}, "out has innermost stride 8, it must be 1; pass"),
    (lambda p: {"lse": torch.empty(2, 1, 8, dtype=torch.bfloat16)}, "lse is torch.bfloat16 of shape (2, 1, 8), the plan asks for torch.float32"),
    (lambda p: {"sinks": torch.zeros(8)}, "spec.sinks is False, but sinks is given; pass [HQ] fp32 exactly when the spec says so"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CALLS, ids=[message[:30] for _, message in CALLS])
def test_decode_refuses_before_any_launch(change: Callable[[DecodeProblem], dict[str, Any]], message: str, no_launch: list[str]) -> None:
    good = problem()
    made = plan_decode(good.spec, good.seq_lens, good.page_table, backend="reference")
    with pytest.raises(SpecError, match=re.escape(message)):
        call(good, made, change(good))
    assert no_launch == []
    call(good, made, {})
    assert no_launch == ["launch"]


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (None, "spec.sinks is True, but sinks is None; pass [HQ] fp32"),
        (torch.zeros(4), "sinks is torch.float32 of shape (4,), the plan asks for torch.float32 of shape (8,); pass that"),
    ],
)
def test_missing_or_wrong_sinks_are_refused(sinks: torch.Tensor | None, message: str, no_launch: list[str]) -> None:
    good = problem(sinks=True)
    made = plan_decode(good.spec, good.seq_lens, good.page_table, backend="reference")
    with pytest.raises(SpecError, match=re.escape(message)):
        call(good, made, {"sinks": sinks})
    assert no_launch == []


def call(good: DecodeProblem, made: DecodePlan, change: dict[str, Any]) -> None:
    arguments = {"q": good.q, "kv": good.kv, "sinks": good.sinks} | change
    decode_attention(arguments.pop("q"), arguments.pop("kv"), made, **arguments)
