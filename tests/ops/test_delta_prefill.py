"""Prefill through a delta layer: transformers' outputs and states, the same however it is cut, and only its own slot touched."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from atoll.errors import SpecError
from atoll.ops.delta import CHUNK, DeltaSpec, delta_prefill, delta_step, gate
from tests.kit.delta import bits, mutated_delta
from tests.kit.mutation import Edit

SPEC = DeltaSpec(2, 4, 16, 24, 4, torch.float32)
NUM_SLOTS, SLOT = 4, 2


@dataclass
class Sequence:
    """One sequence's inputs."""

    mixed: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor


def sequence(num_tokens: int, dtype: torch.dtype = torch.float32) -> Sequence:
    rng = torch.Generator().manual_seed(num_tokens)
    mixed = torch.randn((num_tokens, SPEC.conv_dim), generator=rng).to(dtype)
    a, b = torch.randn((2, num_tokens, SPEC.num_v_heads), generator=rng)
    g, beta = gate(a, b, torch.rand(SPEC.num_v_heads, generator=rng), torch.rand(SPEC.num_v_heads, generator=rng))
    return Sequence(mixed, g, beta, torch.randn((SPEC.conv_dim, SPEC.conv_width), generator=rng).to(dtype))


@dataclass
class Slots:
    """States of all slots."""

    conv: torch.Tensor
    states: torch.Tensor

    def prefill(self, x: Sequence, at: slice, resume: bool, spec: DeltaSpec = SPEC) -> torch.Tensor:
        return delta_prefill(spec, x.mixed[at], x.g[at], x.beta[at], x.weight, self.conv, self.states, SLOT, resume=resume)

    def step(self, x: Sequence, at: slice) -> torch.Tensor:
        slots = torch.tensor([SLOT], dtype=torch.int32)
        return delta_step(SPEC, x.mixed[None, at], x.g[None, at], x.beta[None, at], x.weight, self.conv, self.states, slots)[0]


def make_slots(fill: float = math.nan, dtype: torch.dtype = torch.float32) -> Slots:
    return Slots(torch.full((NUM_SLOTS, *SPEC.conv_state_shape), fill, dtype=dtype), torch.full((NUM_SLOTS, *SPEC.state_shape), fill))


@pytest.fixture(scope="module")
def layer() -> qwen.Qwen3NextGatedDeltaNet:
    """A random layer of transformers with the sizes of SPEC."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    torch.manual_seed(0)
    return qwen.Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"], **sizes), 0)


@torch.no_grad()
def split_projections(layer: qwen.Qwen3NextGatedDeltaNet, hidden: torch.Tensor) -> tuple[Sequence, torch.Tensor]:
    """What transformers' layer feeds to its conv and its gate, and z."""
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    g, beta = gate(a[0], b[0], layer.A_log, layer.dt_bias)
    return Sequence(torch.cat([x[0].flatten(1) for x in (q, k, v)], -1), g, beta, layer.conv1d.weight[:, 0]), z[0]


@torch.no_grad()
def close_layer(layer: qwen.Qwen3NextGatedDeltaNet, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What follows the rule: norm, output gate and projection."""
    normed = layer.norm(out.flatten(0, 1), z.flatten(0, 1))
    return layer.out_proj(normed.view(out.shape[0], -1))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 63, 64, 65, 130])
def test_prefill_is_transformers_layer(num_tokens: int, layer: qwen.Qwen3NextGatedDeltaNet) -> None:
    hidden, slots = torch.randn((1, num_tokens, 48), generator=torch.Generator().manual_seed(1)), make_slots()
    x, z = split_projections(layer, hidden)
    got = close_layer(layer, slots.prefill(x, slice(None), resume=False), z)
    torch.testing.assert_close(got, layer(hidden)[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_len", [1, 3])
def test_prefill_then_decode_is_transformers_layer(query_len: int, layer: qwen.Qwen3NextGatedDeltaNet) -> None:
    hidden, slots, whole = torch.randn((1, 75, 48), generator=torch.Generator().manual_seed(2)), make_slots(), make_slots()
    x, z = split_projections(layer, hidden)
    out = [slots.prefill(x, slice(69), resume=False)] + [slots.step(x, slice(t, t + query_len)) for t in range(69, 75, query_len)]
    torch.testing.assert_close(close_layer(layer, torch.cat(out), z), layer(hidden)[0].detach(), rtol=1e-5, atol=1e-5)
    whole.prefill(x, slice(None), resume=False)
    torch.testing.assert_close(slots.states[SLOT], whole.states[SLOT], rtol=1e-5, atol=1e-5)
    assert torch.equal(slots.conv[SLOT], whole.conv[SLOT])


def test_prefill_at_every_split_is_the_whole() -> None:
    x, whole = sequence(130), make_slots()
    want = whole.prefill(x, slice(None), resume=False)
    for cut in range(1, 130):
        slots = make_slots()
        out = torch.cat([slots.prefill(x, slice(cut), resume=False), slots.prefill(x, slice(cut, None), resume=True)])
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slots.states[SLOT], whole.states[SLOT], rtol=1e-5, atol=1e-5)
        assert torch.equal(slots.conv[SLOT], whole.conv[SLOT])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[64], [128], [64, 128], [64, 128, 192]])
def test_prefill_cut_on_the_grid_has_the_bits_of_the_whole(cuts: list[int], dtype: torch.dtype) -> None:
    assert all(cut % CHUNK == 0 for cut in cuts)
    spec = DeltaSpec(2, 4, 16, 24, 4, dtype)
    x, whole, slots = sequence(200, dtype), make_slots(dtype=dtype), make_slots(dtype=dtype)
    want = whole.prefill(x, slice(None), False, spec)
    out = [slots.prefill(x, slice(lo, hi), lo > 0, spec) for lo, hi in zip([0, *cuts], [*cuts, None], strict=True)]
    for got, expected in ((torch.cat(out), want), (slots.conv, whole.conv), (slots.states, whole.states)):
        assert torch.equal(bits(got), bits(expected))


def test_prefill_cut_off_the_grid_has_other_bits() -> None:
    """The other side of the test above: bits can tell where a prefill was cut."""
    x, whole, slots = sequence(200), make_slots(), make_slots()
    want = whole.prefill(x, slice(None), resume=False)
    out = torch.cat([slots.prefill(x, slice(60), resume=False), slots.prefill(x, slice(60, None), resume=True)])
    assert not torch.equal(bits(out), bits(want))


def strays(prefill: Callable[..., torch.Tensor], resume: bool, fill: float) -> list[str]:
    """What a prefill writes to other slots, and answers that change with what lies in other slots, in the old output and, without `resume`, in its own slot."""
    x, faults, answers = sequence(70), [], []
    for other in (math.nan, fill):
        slots = make_slots(other)
        if resume:
            slots.conv[SLOT], slots.states[SLOT] = 0.5, 0.25
        before = Slots(slots.conv.clone(), slots.states.clone())
        out = torch.full((70, SPEC.num_v_heads, SPEC.v_head_dim), other)
        prefill(SPEC, x.mixed, x.g, x.beta, x.weight, slots.conv, slots.states, SLOT, resume=resume, out=out)
        others = [i for i in range(NUM_SLOTS) if i != SLOT]
        for after, was in ((slots.conv, before.conv), (slots.states, before.states)):
            if not torch.equal(bits(after[others]), bits(was[others])):
                faults.append("stray write")
        answers.append((out, slots.conv[SLOT], slots.states[SLOT]))
    if not all(torch.equal(bits(a), bits(b)) for a, b in zip(*answers, strict=True)):
        faults.append("leak")
    return faults


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("fill", [0.0, math.inf, -1e30])
def test_prefill_touches_its_own_slot_only(fill: float, resume: bool) -> None:
    assert strays(delta_prefill, resume, fill) == []


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit("states[slot], conv_states[slot] =", "states[slot - 1], conv_states[slot] ="), "stray write"),
        (Edit("states[slot], conv_states[slot] =", "states[slot], conv_states[slot - 1] ="), "stray write"),
        (Edit("if not resume:", "if False:"), "leak"),
        (Edit("conv_state, state = conv_states[slot], states[slot]", "conv_state, state = conv_states[slot], states[slot] + 0 * states[0]"), "leak"),
    ],
    ids=["wrong slot written", "wrong conv slot written", "a new sequence reads its slot", "another slot read"],
)
def test_an_error_in_prefill_is_seen(edit: Edit, fault: str, tmp_path: Path) -> None:
    prefill = mutated_delta("chunk.py", (edit,), tmp_path).delta_prefill
    assert fault in strays(prefill, resume=False, fill=0.0) + strays(prefill, resume=True, fill=0.0)


def test_resuming_reads_the_slot() -> None:
    """The other side of the test above: NaN in the sequence's own slot must arrive."""
    x, slots = sequence(70), make_slots()
    assert slots.prefill(x, slice(None), resume=True).isnan().all()


def test_no_tokens() -> None:
    x, slots = sequence(3), make_slots()
    slots.prefill(x, slice(0), resume=True)
    assert slots.states[SLOT].isnan().all()
    slots.prefill(x, slice(0), resume=False)
    assert (slots.states[SLOT] == 0).all() and (slots.conv[SLOT] == 0).all()


def test_strided_slots_are_written_in_place() -> None:
    x, slots, want = sequence(70), make_slots(), make_slots()
    buffer = torch.full((NUM_SLOTS, 3, math.prod(SPEC.state_shape)), math.nan)
    slots.states = buffer[:, 1].unflatten(1, SPEC.state_shape)
    slots.prefill(x, slice(None), resume=False)
    want.prefill(x, slice(None), resume=False)
    assert torch.equal(bits(slots.states), bits(want.states))
    assert buffer[:, [0, 2]].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 4}, "slot 4 is outside 0 to 3; pass the slot that the sequence holds"),
        ({"slot": -1}, "slot -1 is outside 0 to 3"),
        ({"mixed_qkv": torch.zeros(5, 161)}, r"mixed_qkv is torch.float32 of shape \(5, 161\), the call asks for torch.float32 of shape \(5, 160\)"),
        ({"g": torch.zeros(5, 4, dtype=torch.bfloat16)}, "g is torch.bfloat16"),
        ({"beta": torch.zeros(4, 4)}, r"beta is .* of shape \(4, 4\)"),
        ({"conv_weight": torch.zeros(160, 1, 4)}, r"conv_weight is .* of shape \(160, 1, 4\), the spec asks for floating \(160, 4\); squeeze it"),
        ({"states": torch.zeros(4, 4, 16, 24, dtype=torch.float16)}, "states is torch.float16"),
        ({"states": torch.zeros(4, 16, 24)}, r"states has shape \(4, 16, 24\) with 3 dimensions; pass \[R, 4, 16, 24\]"),
        ({"states": torch.zeros(4, 4, 24, 16).transpose(2, 3)}, "states has innermost stride 16, it must be 1"),
        ({"conv_states": torch.zeros(3, 160, 3)}, r"conv_states is .* of shape \(3, 160, 3\), the call asks for .* \(4, 160, 3\)"),
        ({"out": torch.zeros(5, 4, 24, dtype=torch.float64)}, "out is torch.float64"),
        ({"g": torch.zeros(5, 4, device="meta")}, "g is on meta, the states are on cpu"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(change: dict, message: str) -> None:
    x, slots = sequence(5), make_slots()
    arguments = {"mixed_qkv": x.mixed, "g": x.g, "beta": x.beta, "conv_weight": x.weight, "conv_states": slots.conv, "states": slots.states, "slot": SLOT}
    with pytest.raises(SpecError, match=message):
        delta_prefill(SPEC, **(arguments | change), resume=False)
    assert slots.conv.isnan().all() and slots.states.isnan().all()
