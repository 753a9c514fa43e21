"""The definitions of the gated delta rule against transformers' own, and the chunked form against the recurrence."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from atoll.ops.delta import causal_conv, delta_chunked, delta_recurrent, gate, l2norm
from tests.kit.delta import bits, mutated_delta
from tests.kit.mutation import Edit

HK, HV, DK, DV, W = 2, 4, 16, 24, 4
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

Inputs = dict[str, torch.Tensor]


def inputs(num_tokens: int, seed: int = 0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn((2, num_tokens, HV), generator=rng)
    g, beta = gate(a, b, torch.rand(HV, generator=rng), torch.rand(HV, generator=rng))
    q, k = l2norm(torch.randn((2, num_tokens, HK, DK), generator=rng))
    v = torch.randn((num_tokens, HV, DV), generator=rng)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": torch.randn((HV, DK, DV), generator=rng)}


def part(x: Inputs, at: slice, state: torch.Tensor) -> Inputs:
    return {name: tensor[at] for name, tensor in x.items() if name != "initial_state"} | {"initial_state": state}


def transformers_rule(function: object, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    batched = {"query": x["q"], "key": x["k"], "value": x["v"], "g": x["g"], "beta": x["beta"], "initial_state": x["initial_state"]}
    # Repeated here, since older versions leave it to the layer; that the order of heads is right is seen on a whole layer in test_delta_prefill.py.
    batched |= {name: batched[name].repeat_interleave(HV // HK, 1) for name in ("query", "key")}
    out, state = function(**{name: tensor[None] for name, tensor in batched.items()}, output_final_state=True)  # type: ignore[operator]
    return out[0], state[0]


def check_close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("oracle", [qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule], ids=["recurrent", "chunk"])
@pytest.mark.parametrize("rule", [delta_recurrent, delta_chunked])
def test_the_rule_is_transformers(rule: object, oracle: object, num_tokens: int) -> None:
    x = inputs(num_tokens)
    check_close(rule(**x), transformers_rule(oracle, x))  # type: ignore[operator]


def test_strong_decay_does_not_overflow() -> None:
    x = inputs(130)
    x["g"] = x["g"] * 40
    check_close(delta_chunked(**x), delta_recurrent(**x))


@pytest.mark.parametrize("rule", [delta_recurrent, delta_chunked])
def test_no_tokens_keep_the_state(rule: object) -> None:
    x = inputs(0)
    out, state = rule(**x)  # type: ignore[operator]
    assert out.shape == (0, HV, DV)
    assert torch.equal(state, x["initial_state"])


def test_the_initial_state_is_not_written() -> None:
    x = inputs(70)
    before = x["initial_state"].clone()
    delta_recurrent(**x)
    delta_chunked(**x)
    assert torch.equal(x["initial_state"], before)


def test_step_by_step_is_the_recurrence_to_the_bit() -> None:
    x = inputs(20)
    want, state = delta_recurrent(**x)[0], x["initial_state"]
    for t in range(20):
        out, state = delta_recurrent(**part(x, slice(t, t + 1), state))
        assert torch.equal(bits(out[0]), bits(want[t]))


def test_chunked_at_every_split_carries_its_state() -> None:
    x = inputs(130)
    want = delta_recurrent(**x)
    whole = delta_chunked(**x)
    for cut in range(1, 130):
        first, state = delta_chunked(**part(x, slice(cut), x["initial_state"]))
        second, state = delta_chunked(**part(x, slice(cut, None), state))
        got = torch.cat([first, second]), state
        check_close(got, want)
        if cut % 64 == 0:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, whole, strict=True)), cut


def test_l2norm_is_qwens_and_kimis_up_to_a_bit() -> None:
    x = torch.randn((50, 3, DK), generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1] *= 1e-4
    assert torch.equal(l2norm(x), qwen.l2norm(x))
    kimi = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(l2norm(x), kimi, rtol=5e-7, atol=0)
    assert not torch.equal(l2norm(x), kimi)


def test_gate_by_its_formula() -> None:
    a, b = torch.tensor([[0.5, -3.0]]), torch.tensor([[0.0, 2.0]])
    a_log, dt_bias = torch.tensor([0.0, 1.0]), torch.tensor([1.0, -1.0])
    g, beta = gate(a.bfloat16(), b.bfloat16(), a_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    want = [-torch.log1p(torch.tensor(1.5).exp()), -torch.tensor(1.0).exp() * torch.log1p(torch.tensor(-4.0).exp())]
    torch.testing.assert_close(g[0], torch.stack(want), rtol=1e-6, atol=0)
    torch.testing.assert_close(beta[0], torch.tensor([0.5, 1 / (1 + torch.tensor(-2.0).exp())]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_conv_is_transformers_update(num_tokens: int) -> None:
    rng = torch.Generator().manual_seed(2)
    x, weight, state = (torch.randn(shape, generator=rng) for shape in ((num_tokens, 10), (10, W), (10, W - 1)))
    before, want_state = state.clone(), state[None].clone()
    update = getattr(qwen, "torch_causal_conv1d_update", None) or qwen.causal_conv1d_update  # the name of older versions, of newer ones
    want = update(x.t()[None], want_state, weight, None, "silu")[0].t()
    got, new_state = causal_conv(x, weight, state)
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert torch.equal(new_state, want_state[0])
    assert torch.equal(state, before)


def test_conv_from_zeros_is_pytorchs() -> None:
    rng = torch.Generator().manual_seed(3)
    x, weight = torch.randn((30, 10), generator=rng), torch.randn((10, W), generator=rng)
    want = F.silu(F.conv1d(x.t()[None], weight[:, None], padding=W - 1, groups=10))[0, :, :30].t()
    torch.testing.assert_close(causal_conv(x, weight, torch.zeros(10, W - 1))[0], want, **TOLERANCE)


def test_conv_has_the_same_bits_at_every_split() -> None:
    rng = torch.Generator().manual_seed(4)
    x, weight = torch.randn((30, 10), generator=rng).bfloat16(), torch.randn((10, W), generator=rng).bfloat16()
    want, want_state = causal_conv(x, weight, torch.zeros(10, W - 1, dtype=torch.bfloat16))
    for cut in range(31):
        first, state = causal_conv(x[:cut], weight, torch.zeros(10, W - 1, dtype=torch.bfloat16))
        second, state = causal_conv(x[cut:], weight, state)
        assert torch.equal(torch.cat([first, second]), want)
        assert torch.equal(state, want_state)


def test_bf16_inputs_are_summed_in_fp32() -> None:
    x = {name: tensor.bfloat16().float() for name, tensor in inputs(70).items()}
    low = {name: tensor.bfloat16() if name in ("q", "k", "v") else tensor for name, tensor in x.items()}
    assert all(torch.equal(a, b) for a, b in zip(delta_chunked(**low), delta_chunked(**x), strict=True))


# Negative controls: an error put into the source, and the rule in which the oracle must see it.
MUTATIONS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "decay after the read": (
        "delta_recurrent",
        (
            Edit("state = g[:, i_t, None, None].exp() * state", "decay = g[:, i_t, None, None].exp()"),
            Edit("state = state + k[:, i_t, :, None] * delta[:, None, :]", "state = decay * state + k[:, i_t, :, None] * delta[:, None, :]"),
        ),
    ),
    "q not scaled": ("delta_recurrent", (Edit("q = q * k.shape[-1] ** -0.5", "q = q * 1.0"),)),
    "value heads in another order": ("delta_recurrent", (Edit("x.float().repeat_interleave(group, 1)", "x.float().repeat(1, group, 1)"),)),
    "a token's own decay left out of its chunk": ("delta_chunked", (Edit("log_decay = g.cumsum(1)", "log_decay = g.cumsum(1) - g"),)),
    "later tokens seen": ("delta_chunked", (Edit(".triu(1)", ".triu(2)"),)),
    "state not decayed over the chunk": ("delta_chunked", (Edit("decay[:, -1:] * state + ", "state + "),)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_error_in_the_rule_is_seen(name: str, tmp_path: Path) -> None:
    rule, edits = MUTATIONS[name]
    x = inputs(70)
    out, _ = getattr(mutated_delta("reference.py", edits, tmp_path), rule)(**x)
    want, _ = transformers_rule(qwen.torch_recurrent_gated_delta_rule, x)
    assert not torch.allclose(out, want, rtol=1e-2, atol=1e-2)


def test_a_conv_state_one_token_late_is_seen(tmp_path: Path) -> None:
    late = mutated_delta("reference.py", (Edit("inputs[num_tokens:].t()", "inputs[num_tokens - 1 : -1].t()"),), tmp_path)
    x, weight = torch.randn((9, 10), generator=torch.Generator().manual_seed(2)), torch.ones(10, W)
    _, state = late.causal_conv(x, weight, torch.zeros(10, W - 1))
    assert not torch.equal(state, causal_conv(x, weight, torch.zeros(10, W - 1))[1])
