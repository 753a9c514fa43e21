"""Prefill by flash-linear-attention: when it is refused, what it is asked, and on a GPU its outputs and states beside our own."""

import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.ops.delta import CHUNK, DeltaSpec, chunk, delta_prefill, delta_recurrent, fla_chunk, gate, refuse_fla
from tests.kit.delta import bits

SPEC = DeltaSpec(2, 4, 16, 24, 4, torch.bfloat16)
WIDE = DeltaSpec(4, 8, 128, 128, 4, torch.bfloat16)
SLOT = 1


@pytest.fixture(autouse=True)
def fresh_refusals() -> None:
    refuse_fla.cache_clear()


def inputs(spec: DeltaSpec, num_tokens: int, device: str = "cpu") -> dict[str, Any]:
    rng = torch.Generator().manual_seed(num_tokens)
    mixed = torch.randn((num_tokens, spec.conv_dim), generator=rng).to(spec.dtype)
    a, b = torch.randn((2, num_tokens, spec.num_v_heads), generator=rng)
    g, beta = gate(a, b, torch.rand(spec.num_v_heads, generator=rng), torch.rand(spec.num_v_heads, generator=rng))
    weight = torch.randn((spec.conv_dim, spec.conv_width), generator=rng).to(spec.dtype)
    conv = torch.randn((3, *spec.conv_state_shape), generator=rng).to(spec.dtype)
    states = torch.randn((3, *spec.state_shape), generator=rng)
    return {name: x.to(device) for name, x in {"mixed_qkv": mixed, "g": g, "beta": beta, "conv_weight": weight, "conv_states": conv, "states": states}.items()}


def prefill(spec: DeltaSpec, given: dict[str, Any], *cuts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of all tokens, and both states; the tokens are fed in pieces that end at `cuts`."""
    conv, states, bounds = given["conv_states"].clone(), given["states"].clone(), [0, *cuts, len(given["g"])]
    pieces = []
    for begin, end in pairwise(bounds):
        own = (given[name][begin:end] for name in ("mixed_qkv", "g", "beta"))
        pieces.append(delta_prefill(spec, *own, given["conv_weight"], conv, states, SLOT, resume=True))
    return torch.cat(pieces), conv, states


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "fla" else find_spec(name))
    monkeypatch.setattr(fla_chunk, "_installed_version", lambda: version)


@pytest.mark.parametrize(
    ("device_type", "dtype", "version", "reason"),
    [
        ("cpu", torch.bfloat16, "0.6.0", "its kernels need a GPU, the tensors are on cpu"),
        ("cuda", torch.float32, "0.6.0", "its products are in 16 bits, the model is in torch.float32"),
        ("cuda", torch.bfloat16, "0.5.2", "fla-core 0.5.2 is below 0.6; pip install --upgrade 'atoll[fla]'"),
        ("cuda", torch.bfloat16, None, "fla-core of unknown version is below 0.6; pip install --upgrade 'atoll[fla]'"),
        ("cuda", torch.bfloat16, "0.6.0", None),
        ("cuda", torch.float16, "1.0", None),
        ("cuda", torch.float16, "0.10rc1", None),
    ],
)
def test_a_refusal_has_its_reason(device_type: str, dtype: torch.dtype, version: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    assert refuse_fla(device_type, dtype) == reason


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refuse_fla("cuda", torch.bfloat16) == "fla is not installed; pip install 'atoll[fla]'"


def test_nothing_is_imported_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the real package is without a GPU: its import fails, and may not be tried.
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fla_chunk, "_installed_version", lambda: "0.6.0")
    assert refuse_fla("cuda", torch.bfloat16) is None, "found without being imported"
    assert prefill(SPEC, inputs(SPEC, 70))[0].isfinite().all() and "fla" not in sys.modules
    monkeypatch.setattr(chunk, "refuse_fla", lambda device_type, dtype: None)
    with pytest.raises(RuntimeError, match="no GPU"):
        prefill(SPEC, inputs(SPEC, 70))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A `fla` with the documented interface of its one function that we call, computed by the recurrence; returns what it was asked."""
    calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append({"q": q, "k": k, "v": v} | options)
        assert options["scale"] == q.shape[-1] ** -0.5 and options["output_final_state"]
        out, state = delta_recurrent(q[0], k[0], v[0], options["g"][0], options["beta"][0], options["initial_state"][0])
        return out[None].to(q.dtype), state[None]

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(chunk, "refuse_fla", lambda device_type, dtype: None)
    return calls


def own_prefill(spec: DeltaSpec, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(chunk, "refuse_fla", lambda device_type, dtype: "not now")
        return prefill(spec, given)


@pytest.mark.parametrize("num_tokens", [1, 3, 63, 64, 65, 130])
def test_it_is_asked_what_our_own_is_asked(num_tokens: int, stand_in: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(SPEC, num_tokens)
    found, wanted = prefill(SPEC, given), own_prefill(SPEC, given, monkeypatch)
    [call] = stand_in
    assert call["q"].shape == call["k"].shape == (1, num_tokens, 2, 16) and call["v"].shape == (1, num_tokens, 4, 24)
    assert call["g"].shape == call["beta"].shape == (1, num_tokens, 4) and call["g"].dtype == torch.float32
    assert call["initial_state"].shape == (1, 4, 16, 24) and call["initial_state"].dtype == torch.float32
    assert {call[name].dtype for name in "qkv"} == {torch.bfloat16}
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=3e-2)
    assert torch.equal(found[1], wanted[1])


def test_no_tokens_ask_nothing(stand_in: list[dict[str, Any]]) -> None:
    given = inputs(SPEC, 0)
    out, conv, states = prefill(SPEC, given)
    assert not stand_in and out.shape == (0, 4, 24)
    assert torch.equal(conv, given["conv_states"]) and torch.equal(states, given["states"])


def transposed(call: Callable[..., Any]) -> Callable[..., Any]:
    def with_state_transposed(*args: Any, **options: Any) -> Any:
        state = options["initial_state"]
        return call(*args, **options | {"initial_state": state.transpose(2, 3).reshape(state.shape)})

    return with_state_transposed


def test_control_a_state_in_another_layout_shows(stand_in: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    given, module = inputs(SPEC, 70), sys.modules["fla.ops.gated_delta_rule"]
    wanted = own_prefill(SPEC, given, monkeypatch)
    monkeypatch.setattr(module, "chunk_gated_delta_rule", transposed(module.chunk_gated_delta_rule))
    out = prefill(SPEC, given)[0]
    assert len(stand_in) == 1 and (out.float() - wanted[0].float()).abs().max() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [WIDE, DeltaSpec(2, 2, 64, 64, 4, torch.float16)], ids=["grouped", "fp16"])
def test_the_real_kernels_agree_with_our_own(spec: DeltaSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    assert refuse_fla("cuda", spec.dtype) is None
    for num_tokens in (1, 63, 64, 65, 200, 1000):
        given = inputs(spec, num_tokens, "cuda")
        found, wanted = prefill(spec, given), own_prefill(spec, given, monkeypatch)
        for got, want in zip(found, wanted, strict=True):
            # Both round the same inputs to 16 bits; theirs the products' operands too.
            assert (got.float() - want.float()).abs().max() <= 2e-2 * want.float().abs().max(), num_tokens
        assert torch.equal(found[1], wanted[1])
        for other in (0, 2):
            assert torch.equal(bits(found[2][other]), bits(given["states"][other])), "another slot was written"


@pytest.mark.gpu
def test_the_real_kernels_give_the_same_bits_however_a_prefill_is_cut_on_the_grid() -> None:
    pytest.importorskip("fla")
    given = inputs(WIDE, 6 * CHUNK + 17, "cuda")
    wanted = prefill(WIDE, given)
    for cuts in ([CHUNK], [3 * CHUNK], [CHUNK, 2 * CHUNK, 5 * CHUNK], [6 * CHUNK]):
        for got, want in zip(prefill(WIDE, given, *cuts), wanted, strict=True):
            assert torch.equal(bits(got), bits(want)), cuts
