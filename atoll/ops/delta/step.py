"""Decode of a batch through a delta layer: a few tokens per sequence, states read and written in place in their slots. Knows slots, not sequences."""

from dataclasses import dataclass

import torch

from atoll.errors import SpecError
from atoll.ops.delta.reference import conv_heads, delta_recurrent
from atoll.ops.delta.spec import DeltaSpec, check_states, check_tensor, check_weight


@dataclass(frozen=True)
class StepTrace:
    """Buffers for what a step passes through, so that a sequence can later be set back to any of its tokens.

    After query token `t` of sequence `b` the recurrent state is `states[b, t]` and the conv state is `conv_inputs[b, :, t + 1 : t + W]`.
    """

    states: torch.Tensor  # [B, QL, HV, DK, DV] fp32
    conv_inputs: torch.Tensor  # [B, conv_dim, W - 1 + QL] spec.dtype: the conv state before the step, then the step's inputs


def make_trace(spec: DeltaSpec, batch: int, query_len: int, device: torch.device | str = "cpu") -> StepTrace:
    """An unwritten trace for steps of that batch and query length."""
    return StepTrace(
        torch.empty((batch, query_len, *spec.state_shape), dtype=torch.float32, device=device),
        torch.empty((batch, spec.conv_dim, spec.conv_width - 1 + query_len), dtype=spec.dtype, device=device),
    )


def delta_step(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,  # [B, QL, conv_dim] spec.dtype
    g: torch.Tensor,  # [B, QL, HV] fp32, log of the decay
    beta: torch.Tensor,  # [B, QL, HV] fp32
    conv_weight: torch.Tensor,  # [conv_dim, W]
    conv_states: torch.Tensor,  # [R, conv_dim, W - 1] spec.dtype, at any strides
    states: torch.Tensor,  # [R, HV, DK, DV] fp32, at any strides but the last
    slots: torch.Tensor,  # [B] int32; -1: no sequence
    *,
    query_lens: torch.Tensor | None = None,  # [B] int32, 0 to QL; None: QL
    out: torch.Tensor | None = None,  # [B, QL, HV, DV] spec.dtype
    trace: StepTrace | None = None,
) -> torch.Tensor:
    """Conv, norm of q and k, and the delta rule over each sequence's first `query_lens` tokens; returns `out [B, QL, HV, DV]`.

    Written: both states of every named slot, to what they are after its last token; all of `out`, with zeros where there is no token; and, if given, the part
    of `trace` that belongs to tokens (the W - 1 earlier conv inputs included). Nothing else is written, and nothing of another slot is read. On a GPU two
    kernels, no sync, fit for a CUDA graph: `slots` and `query_lens` may be rewritten between replays.

    Edge: slot -1 or query length 0 reads and writes nothing but its zeros in `out`. A slot that is named twice ends with the state of either.
    Error: 1e-5 against `delta_recurrent` in fp32 (tests/ops/test_delta_step.py).
    Raises: SpecError for shapes, dtypes or devices that do not fit. Slots and query lengths out of range, and slots named twice, are found on a CPU only; on a
    GPU they are the caller's bug.
    """
    out = _check(spec, mixed_qkv, g, beta, conv_weight, conv_states, states, slots, query_lens, out, trace)
    if out.numel() == 0:
        return out
    if states.device.type == "cuda":
        # Imported here, since a CPU install may lack Triton.
        from atoll.ops.delta.triton_step import delta_step_triton

        delta_step_triton(spec, mixed_qkv, g, beta, conv_weight, conv_states, states, slots, query_lens, out, trace)
    else:
        delta_step_torch(spec, mixed_qkv, g, beta, conv_weight, conv_states, states, slots, query_lens, out, trace)
    return out


def delta_step_torch(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    query_lens: torch.Tensor | None,
    out: torch.Tensor,
    trace: StepTrace | None,
) -> None:
    """The plain definition of `delta_step`, sequence by sequence; reads the slots on the host. Arguments as there."""
    batch, query_len = mixed_qkv.shape[:2]
    lens = query_lens.tolist() if query_lens is not None else [query_len] * batch
    _check_values(slots.tolist(), lens, states.shape[0], query_len)
    out.zero_()
    for i_b, (slot, num_tokens) in enumerate(zip(slots.tolist(), lens, strict=True)):
        if slot < 0 or num_tokens == 0:
            continue
        conv_state, state = conv_states[slot], states[slot]
        # One token at a time, so that a step of several has the bits of as many steps of one.
        for t in range(num_tokens):
            at = slice(t, t + 1)
            q, k, v, conv_state = conv_heads(spec, mixed_qkv[i_b, at], conv_weight, conv_state)
            out[i_b, at], state = delta_recurrent(q, k, v, g[i_b, at], beta[i_b, at], state)
            if trace is not None:
                trace.states[i_b, t] = state
        if trace is not None:
            inputs = torch.cat([conv_states[slot], mixed_qkv[i_b, :num_tokens].t()], 1)
            trace.conv_inputs[i_b, :, : inputs.shape[1]] = inputs
        states[slot], conv_states[slot] = state, conv_state


def _check(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    query_lens: torch.Tensor | None,
    out: torch.Tensor | None,
    trace: StepTrace | None,
) -> torch.Tensor:
    """Raise SpecError for what does not fit; returns `out`, made if there is none."""
    check_states(spec, conv_states, states)
    if mixed_qkv.dim() != 3:
        raise SpecError(f"mixed_qkv has shape {tuple(mixed_qkv.shape)} with {mixed_qkv.dim()} dimensions; pass [B, QL, {spec.conv_dim}]")
    device, (batch, query_len) = states.device, mixed_qkv.shape[:2]
    heads = (batch, query_len, spec.num_v_heads)
    check_tensor("mixed_qkv", mixed_qkv, (batch, query_len, spec.conv_dim), spec.dtype, device)
    check_tensor("g", g, heads, torch.float32, device)
    check_tensor("beta", beta, heads, torch.float32, device)
    check_weight(spec, conv_weight, device)
    check_tensor("slots", slots, (batch,), torch.int32, device)
    if query_lens is not None:
        check_tensor("query_lens", query_lens, (batch,), torch.int32, device)
    if trace is not None:
        check_tensor("trace.states", trace.states, (batch, query_len, *spec.state_shape), torch.float32, device)
        check_tensor("trace.conv_inputs", trace.conv_inputs, (batch, spec.conv_dim, spec.conv_width - 1 + query_len), spec.dtype, device)
    if out is None:
        return torch.empty((*heads, spec.v_head_dim), dtype=spec.dtype, device=device)
    check_tensor("out", out, (*heads, spec.v_head_dim), spec.dtype, device)
    return out


def _check_values(slots: list[int], query_lens: list[int], num_slots: int, query_len: int) -> None:
    for slot in slots:
        if not -1 <= slot < num_slots:
            raise SpecError(f"slot {slot} is outside 0 to {num_slots - 1}; pass the slot that the sequence holds, or -1 for no sequence")
    for num_tokens in query_lens:
        if not 0 <= num_tokens <= query_len:
            raise SpecError(f"query length {num_tokens} is outside 0 to {query_len}; mixed_qkv has {query_len} tokens per sequence")
    named = [slot for slot in slots if slot >= 0]
    if len(set(named)) < len(named):
        twice = next(slot for slot in named if named.count(slot) > 1)
        raise SpecError(f"slot {twice} is named {named.count(twice)} times, the limit is once; give every sequence a slot of its own")
