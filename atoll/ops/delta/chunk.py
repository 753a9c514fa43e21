"""Prefill of one sequence through a delta layer: many tokens at once, from its slot's state, or from nothing, to its slot's state."""

import torch

from atoll.errors import SpecError
from atoll.ops.delta.fla_chunk import delta_chunked_fla, refuse_fla
from atoll.ops.delta.reference import CHUNK, conv_heads, delta_chunked
from atoll.ops.delta.spec import DeltaSpec, check_states, check_tensor, check_weight


def delta_prefill(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,  # [T, conv_dim] spec.dtype
    g: torch.Tensor,  # [T, HV] fp32, log of the decay
    beta: torch.Tensor,  # [T, HV] fp32
    conv_weight: torch.Tensor,  # [conv_dim, W]
    conv_states: torch.Tensor,  # [R, conv_dim, W - 1] spec.dtype
    states: torch.Tensor,  # [R, HV, DK, DV] fp32
    slot: int,
    *,
    resume: bool,
    out: torch.Tensor | None = None,  # [T, HV, DV] spec.dtype
) -> torch.Tensor:
    """Conv, norm of q and k, and the chunked delta rule over the next tokens of one sequence; returns `out [T, HV, DV]`.

    `resume=True` starts from the state in the slot, `resume=False` at the sequence's beginning, and then nothing that lies in the slot is read. The state after
    the last token is written to the slot, in place; no other slot is read or written.

    A prefill that is cut at multiples of CHUNK tokens gives the bits of the whole one, outputs and state; cut elsewhere, the same up to rounding
    (tests/ops/test_delta_prefill.py). On a GPU flash-linear-attention's kernels run where `refuse_fla` has nothing against it, else PyTorch's everywhere.

    Edge: no tokens with `resume=True` touch nothing; with `resume=False` they write zeros, the state of an empty sequence.
    Error: 1e-5 against `delta_recurrent` in fp32 (the same tests); with flash-linear-attention that of products in 16 bits (tests/ops/test_delta_fla.py).
    Raises: SpecError for shapes, dtypes or devices that do not fit, and for a slot that is not there.
    """
    _check(spec, mixed_qkv, g, beta, conv_weight, conv_states, states, slot)
    if out is None:
        out = torch.empty((mixed_qkv.shape[0], spec.num_v_heads, spec.v_head_dim), dtype=spec.dtype, device=states.device)
    else:
        check_tensor("out", out, (mixed_qkv.shape[0], spec.num_v_heads, spec.v_head_dim), spec.dtype, states.device)
    conv_state, state = conv_states[slot], states[slot]
    if not resume:
        conv_state, state = torch.zeros_like(conv_state), torch.zeros_like(state)
    by_fla = mixed_qkv.shape[0] > 0 and refuse_fla(states.device.type, spec.dtype) is None
    run = _run_fla if by_fla else _run_torch
    states[slot], conv_states[slot] = run(spec, out, mixed_qkv, g, beta, conv_weight, conv_state, state)
    return out


def _run_torch(
    spec: DeltaSpec,
    out: torch.Tensor,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `out`; returns the state and the conv state after the last token."""
    # Conv and norm by chunks too: a reduction may sum in another order when there are more rows, and the bits would depend on the cut.
    for start in range(0, mixed_qkv.shape[0], CHUNK):
        at = slice(start, start + CHUNK)
        q, k, v, conv_state = conv_heads(spec, mixed_qkv[at], conv_weight, conv_state)
        out[at], state = delta_chunked(q, k, v, g[at], beta[at], state)
    return state, conv_state


def _run_fla(
    spec: DeltaSpec,
    out: torch.Tensor,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_run_torch`, all chunks in one call."""
    # The rest that fills no chunk apart: from 64 rows on torch's norm sums in one order, for fewer it may choose another, and the rest of a whole prefill must
    # have the bits that it has alone.
    num_whole = mixed_qkv.shape[0] // CHUNK * CHUNK
    parts = []
    for rows in (mixed_qkv[:num_whole], mixed_qkv[num_whole:]):
        q, k, v, conv_state = conv_heads(spec, rows, conv_weight, conv_state)
        parts.append((q, k, v))
    q, k, v = (torch.cat(pair) for pair in zip(*parts, strict=True))
    out[:], state = delta_chunked_fla(q, k, v, g, beta, state)
    return state, conv_state


def _check(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    slot: int,
) -> None:
    check_states(spec, conv_states, states)
    num_tokens, num_slots = mixed_qkv.shape[0], states.shape[0]
    check_tensor("mixed_qkv", mixed_qkv, (num_tokens, spec.conv_dim), spec.dtype, states.device)
    check_tensor("g", g, (num_tokens, spec.num_v_heads), torch.float32, states.device)
    check_tensor("beta", beta, (num_tokens, spec.num_v_heads), torch.float32, states.device)
    check_weight(spec, conv_weight, states.device)
    if not 0 <= slot < num_slots:
        raise SpecError(f"slot {slot} is outside 0 to {num_slots - 1}; pass the slot that the sequence holds")
