"""The gated delta rule and its companions by their definition: plain PyTorch in fp32, one sequence at a time. Knows no slot and no batch.

Shapes: q, k `[T, HK, DK]`, v `[T, HV, DV]`, g, beta `[T, HV]`, a recurrent state `[HV, DK, DV]`, a conv state `[C, W - 1]`.
"""

import torch
import torch.nn.functional as F

from atoll.ops.delta.spec import DeltaSpec

# Tokens per step of the chunked form. Also the grid on which a prefill may be cut without changing its bits.
CHUNK = 64


def delta_recurrent(
    q: torch.Tensor,  # [T, HK, DK]
    k: torch.Tensor,  # [T, HK, DK]
    v: torch.Tensor,  # [T, HV, DV]
    g: torch.Tensor,  # [T, HV] log of the decay
    beta: torch.Tensor,  # [T, HV]
    initial_state: torch.Tensor,  # [HV, DK, DV]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, token by token; returns `out [T, HV, DV]` and the final state `[HV, DK, DV]`, both fp32.

    For each head: `S = exp(g) S`, then `S = S + k (beta (v - k S))`, then `out = DK**-0.5 q S`; so the delta is read from the *decayed* state. q and k
    come as they shall be used, normalized or not. `initial_state` is not written.

    Edge: no tokens give an empty output and the initial state.
    Source: Gated Delta Networks, Yang et al. 2024 (arXiv:2412.06464).
    """
    q, k, v, g, beta, state = _per_value_head(q, k, v, g, beta, initial_state)
    out = torch.empty_like(v)
    for i_t in range(v.shape[1]):
        state = g[:, i_t, None, None].exp() * state
        delta = beta[:, i_t, None] * (v[:, i_t] - (k[:, i_t, :, None] * state).sum(1))
        state = state + k[:, i_t, :, None] * delta[:, None, :]
        out[:, i_t] = (q[:, i_t, :, None] * state).sum(1)
    return out.transpose(0, 1), state


def delta_chunked(
    q: torch.Tensor,  # [T, HK, DK]
    k: torch.Tensor,  # [T, HK, DK]
    v: torch.Tensor,  # [T, HV, DV]
    g: torch.Tensor,  # [T, HV]
    beta: torch.Tensor,  # [T, HV]
    initial_state: torch.Tensor,  # [HV, DK, DV]
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_recurrent`, but whole chunks of tokens by matrix products: the same result in another order of summation.

    Within a chunk the deltas of its tokens depend on each other through a unit lower triangular system, which is solved directly. A chunk is computed in the
    same way wherever it lies in the sequence, so that two calls that meet on a chunk's edge give the bits of one.

    Edge: a NaN in one token reaches every output of its chunk, the earlier ones too (a zero weight times NaN), where the recurrence spares those.
    Error: 1e-5 against `delta_recurrent` (tests/ops/test_delta_reference.py).
    Source: Parallelizing Linear Transformers with the Delta Rule, Yang et al. 2024 (arXiv:2406.06484); with decay, arXiv:2412.06464.
    """
    q, k, v, g, beta, state = _per_value_head(q, k, v, g, beta, initial_state)
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], chunk):
        # In memory of their own, since a matrix library may sum in another order at another stride or alignment.
        parts = [x[:, start : start + chunk].contiguous() for x in (q, k, v, g, beta)]
        out[:, start : start + chunk], state = _one_chunk(state, *parts)
    return out.transpose(0, 1), state


def _one_chunk(
    state: torch.Tensor,  # [HV, DK, DV] before the chunk
    q: torch.Tensor,  # [HV, C, DK], scaled
    k: torch.Tensor,  # [HV, C, DK]
    v: torch.Tensor,  # [HV, C, DV]
    g: torch.Tensor,  # [HV, C]
    beta: torch.Tensor,  # [HV, C]
) -> tuple[torch.Tensor, torch.Tensor]:
    log_decay = g.cumsum(1)  # since the chunk's start, the token's own included
    decay = log_decay.exp()[:, :, None]
    # From token j to token i; above the diagonal the difference is positive and its exponential may overflow, so it is masked before.
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
    between = (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill(later, -torch.inf).exp()  # [HV, C, C]
    # delta_i = beta_i (v_i - what the state before the chunk says - what the deltas j < i say). The solver takes the diagonal for 1 and reads below it only.
    system = beta[:, :, None] * between * (k @ k.transpose(1, 2))
    delta = torch.linalg.solve_triangular(system, beta[:, :, None] * (v - decay * (k @ state)), upper=False, unitriangular=True)
    out = decay * (q @ state) + (between * (q @ k.transpose(1, 2))) @ delta
    to_end = (log_decay[:, -1:] - log_decay).exp()[:, :, None]
    return out, decay[:, -1:] * state + (to_end * k).transpose(1, 2) @ delta


def _per_value_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in fp32 with heads first, q scaled, and q and k repeated for the value heads that they serve."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (q, k))
    q = q * k.shape[-1] ** -0.5
    return (*(x.float().transpose(0, 1) for x in (q, k, v, g, beta)), state.float())  # type: ignore[return-value]


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x * rsqrt(sum(x²) + eps)` over the last dimension, in fp32: Qwen's form.

    Kimi's is `x / sqrt(sum(x²) + eps)`: the same number, but rounded once less, so that the two differ in the last bit.
    """
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gate(
    a: torch.Tensor,  # [T, HV]
    b: torch.Tensor,  # [T, HV]
    a_log: torch.Tensor,  # [HV]
    dt_bias: torch.Tensor,  # [HV]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log decay `g = -exp(a_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, both `[T, HV]` fp32."""
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()


def causal_conv(
    x: torch.Tensor,  # [T, C]
    weight: torch.Tensor,  # [C, W]
    state: torch.Tensor,  # [C, W - 1] the inputs before x, oldest first; zeros at a sequence's start
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal conv and SiLU; returns `[T, C]` in x's dtype (summed in fp32) and the state after it, in the state's dtype.

    `state` is not written. A token's output has the same bits however a sequence is cut into calls.
    """
    num_tokens, width = x.shape[0], weight.shape[1]
    inputs = torch.cat([state.t().to(x.dtype), x])  # [W - 1 + T, C]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i_w in range(width):
        out += weight[:, i_w].float() * inputs[i_w : i_w + num_tokens].float()
    return F.silu(out).to(x.dtype), inputs[num_tokens:].t().to(state.dtype)


def conv_heads(
    spec: DeltaSpec,
    mixed_qkv: torch.Tensor,  # [T, conv_dim]
    conv_weight: torch.Tensor,  # [conv_dim, W]
    conv_state: torch.Tensor,  # [conv_dim, W - 1]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What comes before the delta rule: the conv, the split into heads, and the norm of q and k; returns q, k, v and the new conv state."""
    mixed, new_state = causal_conv(mixed_qkv, conv_weight, conv_state)
    q, k, v = mixed.split([spec.key_dim, spec.key_dim, spec.value_dim], -1)
    q, k = (l2norm(x.unflatten(-1, (spec.num_k_heads, spec.k_head_dim)), spec.l2_eps) for x in (q, k))
    return q, k, v.unflatten(-1, (spec.num_v_heads, spec.v_head_dim)), new_state
