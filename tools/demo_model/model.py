"""The demo model for training: Qwen3.5's text decoder as functions of a flat dict of tensors under Hugging Face's names, with one multi-token-prediction layer.

Dimensions: B rows, T tokens, H hidden size, N chunks of a row, C tokens of a chunk, HK HV DK DV heads and their sizes in linear attention. Chunks come first
(`[N, B, HV, C, D]`), so that the recurrence over chunks reads contiguous slices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tools.demo_model.delta import scan_chunks, unit_lower_inverse

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """All sizes of the model."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 8
    attention_interval: int = 4  # every fourth layer attends
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 100_000.0
    num_k_heads: int = 2  # of linear attention
    num_v_heads: int = 4
    k_head_dim: int = 64
    v_head_dim: int = 64
    conv_width: int = 4
    rms_eps: float = 1e-6
    chunk: int = 64
    max_position: int = 4096

    def is_linear(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval != 0

    def hf_config(self, *, eos_token_ids: list[int], pad_token_id: int) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "layer_types": ["linear_attention" if self.is_linear(i) else "full_attention" for i in range(self.num_layers)],
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "linear_key_head_dim": self.k_head_dim,
            "linear_value_head_dim": self.v_head_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "attn_output_gate": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_position,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_dim / self.head_dim},
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "eos_token_id": eos_token_ids,
            "pad_token_id": pad_token_id,
        }


def init_weights(shape: Shape, seed: int = 0) -> Weights:
    """fp32, on the CPU. Projections back into the residual stream start at zero."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, std: float | None = None) -> None:
        weights[name] = torch.randn(rows, columns, generator=generator) * (0.5 * columns**-0.5 if std is None else std)

    def attention_layer(prefix: str) -> None:
        q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        matrix(f"{prefix}self_attn.q_proj.weight", 2 * q, shape.hidden_size)
        matrix(f"{prefix}self_attn.k_proj.weight", kv, shape.hidden_size)
        matrix(f"{prefix}self_attn.v_proj.weight", kv, shape.hidden_size)
        matrix(f"{prefix}self_attn.o_proj.weight", shape.hidden_size, q, 0.0)
        weights[f"{prefix}self_attn.q_norm.weight"] = torch.zeros(shape.head_dim)
        weights[f"{prefix}self_attn.k_norm.weight"] = torch.zeros(shape.head_dim)

    def delta_layer(prefix: str) -> None:
        value_dim = shape.num_v_heads * shape.v_head_dim
        conv_dim = 2 * shape.num_k_heads * shape.k_head_dim + value_dim
        matrix(f"{prefix}linear_attn.in_proj_qkv.weight", conv_dim, shape.hidden_size)
        matrix(f"{prefix}linear_attn.in_proj_z.weight", value_dim, shape.hidden_size)
        matrix(f"{prefix}linear_attn.in_proj_b.weight", shape.num_v_heads, shape.hidden_size)
        matrix(f"{prefix}linear_attn.in_proj_a.weight", shape.num_v_heads, shape.hidden_size)
        matrix(f"{prefix}linear_attn.out_proj.weight", shape.hidden_size, value_dim, 0.0)
        weights[f"{prefix}linear_attn.conv1d.weight"] = (torch.rand(conv_dim, 1, shape.conv_width, generator=generator) - 0.5) * shape.conv_width**-0.5 * 2
        # Decays of a step from about 0.999 to 0.4: heads that keep and heads that forget.
        steps = torch.exp(torch.rand(shape.num_v_heads, generator=generator) * 4.6 - 6.9)
        weights[f"{prefix}linear_attn.dt_bias"] = steps + torch.log(-torch.expm1(-steps))
        weights[f"{prefix}linear_attn.A_log"] = torch.log(1 + 8 * torch.rand(shape.num_v_heads, generator=generator))
        weights[f"{prefix}linear_attn.norm.weight"] = torch.ones(shape.v_head_dim)

    def rest(prefix: str) -> None:
        weights[f"{prefix}input_layernorm.weight"] = torch.zeros(shape.hidden_size)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.zeros(shape.hidden_size)
        matrix(f"{prefix}mlp.gate_proj.weight", shape.intermediate_size, shape.hidden_size)
        matrix(f"{prefix}mlp.up_proj.weight", shape.intermediate_size, shape.hidden_size)
        matrix(f"{prefix}mlp.down_proj.weight", shape.hidden_size, shape.intermediate_size, 0.0)

    matrix("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size, 0.02)
    for i in range(shape.num_layers):
        prefix = f"model.layers.{i}."
        (delta_layer if shape.is_linear(i) else attention_layer)(prefix)
        rest(prefix)
    weights["model.norm.weight"] = torch.zeros(shape.hidden_size)
    matrix("mtp.fc.weight", shape.hidden_size, 2 * shape.hidden_size)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = torch.zeros(shape.hidden_size)
    attention_layer("mtp.layers.0.")
    rest("mtp.layers.0.")
    return weights


def under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm with a zero-centred scale, computed in fp32."""
    return (F.rms_norm(x.float(), (x.shape[-1],), eps=eps) * (1.0 + weight.float())).to(x.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def mlp(x: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    """The second half of a layer, residual included."""
    h = norm(x, w["post_attention_layernorm.weight"], shape.rms_eps)
    return x + linear(F.silu(linear(h, w["mlp.gate_proj.weight"])) * linear(h, w["mlp.up_proj.weight"]), w["mlp.down_proj.weight"])


def rotation(positions: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, 1, rotary dim]`, fp32."""
    inverse = shape.rope_theta ** -(torch.arange(0, shape.rotary_dim, 2, device=positions.device, dtype=torch.float32) / shape.rotary_dim)
    angles = (positions.float()[:, None] * inverse).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The leading dimensions of every head `[..., T, heads, D]` turn, half-split."""
    width = cos.shape[-1]
    turning, still = x[..., :width].float(), x[..., width:]
    first, second = turning.chunk(2, -1)
    return torch.cat(((turning * cos + torch.cat((-second, first), -1) * sin).to(x.dtype), still), -1)


def attention_inputs(h: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Of normed hidden states `[B, T, H]`: rotated q, rotated k, v `[B, T, heads, D]` and the gates `[B, T, HQ * D]`."""
    q, gate = linear(h, w["self_attn.q_proj.weight"]).unflatten(-1, (shape.num_q_heads, 2, shape.head_dim)).unbind(-2)
    k = linear(h, w["self_attn.k_proj.weight"]).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    v = linear(h, w["self_attn.v_proj.weight"]).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    q = rotate(norm(q, w["self_attn.q_norm.weight"], shape.rms_eps), cos, sin)
    k = rotate(norm(k, w["self_attn.k_norm.weight"], shape.rms_eps), cos, sin)
    return q, k, v, gate.flatten(-2)


def attention_layer(x: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, shape: Shape) -> torch.Tensor:
    h = norm(x, w["input_layernorm.weight"], shape.rms_eps)
    q, k, v, gate = attention_inputs(h, w, cos, sin, shape)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
    return mlp(x + linear(out, w["self_attn.o_proj.weight"]), w, shape)


def delta_projections(x: torch.Tensor, w: Weights, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Of hidden states `[B, T, H]`: q, k and v before the conv, `[B, T, channels]`; z; log decay g and beta `[B, T, HV]` fp32."""
    h = norm(x, w["input_layernorm.weight"], shape.rms_eps)
    g = -w["linear_attn.A_log"].float().exp() * F.softplus(linear(h, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"].float())
    return (
        linear(h, w["linear_attn.in_proj_qkv.weight"]),
        linear(h, w["linear_attn.in_proj_z.weight"]),
        g,
        linear(h, w["linear_attn.in_proj_b.weight"]).float().sigmoid(),
    )


def split_heads(mixed: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the conv's output `[..., channels]`: unit q (scaled), unit k, v as heads, fp32."""
    key_dim = shape.num_k_heads * shape.k_head_dim
    q, k, v = mixed.split((key_dim, key_dim, shape.num_v_heads * shape.v_head_dim), -1)
    q, k = (unit(part.unflatten(-1, (shape.num_k_heads, shape.k_head_dim))) for part in (q, k))
    return q * shape.k_head_dim**-0.5, k, v.unflatten(-1, (shape.num_v_heads, shape.v_head_dim)).float()


def delta_prepare(x: torch.Tensor, w: Weights, shape: Shape) -> tuple[torch.Tensor, ...]:
    """All of a delta layer before the recurrence over chunks; see `scan_chunks` for u, w, k, gamma and `delta_finish` for the rest."""
    num_tokens = x.shape[1]
    mixed, z, g, beta = delta_projections(x, w, shape)
    padded = F.pad(mixed, (0, 0, shape.conv_width - 1, 0))
    taps = w["linear_attn.conv1d.weight"].to(x.dtype)[:, 0]
    mixed = F.silu(sum(padded[:, i : i + num_tokens] * taps[:, i] for i in range(shape.conv_width)))
    q, k, v = split_heads(mixed, shape)
    group = shape.num_v_heads // shape.num_k_heads

    def chunks(t: torch.Tensor) -> torch.Tensor:  # [B, T, heads, ...] to [N, B, heads, C, ...]
        return t.unflatten(1, (-1, shape.chunk)).movedim(1, 0).movedim(3, 2)

    def by_value_head(t: torch.Tensor) -> torch.Tensor:  # [N, B, HK, ...] to [N, B, HV, ...]
        return t.repeat_interleave(group, dim=2)

    q, k, v, g, beta = (chunks(t) for t in (q, k, v, g, beta))
    total = g.cumsum(-1)  # [N, B, HV, C]
    above = torch.ones(shape.chunk, shape.chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    k_t = k.transpose(-1, -2)
    scores = by_value_head(q @ k_t) * decay
    system = (by_value_head(k @ k_t) * decay * beta[..., None]).tril(-1)
    inverse = unit_lower_inverse(system)
    q, k = by_value_head(q), by_value_head(k)
    grown = total.exp()[..., None]
    values = inverse @ (v * beta[..., None])
    keys_in = inverse @ (k * (beta[..., None] * grown))
    keys_out = k * (total[..., -1:] - total).exp()[..., None]
    return z, q * grown, scores, values, keys_in, keys_out, total[..., -1].exp()


def delta_finish(
    x: torch.Tensor, z: torch.Tensor, q: torch.Tensor, scores: torch.Tensor, v: torch.Tensor, states: torch.Tensor, w: Weights, shape: Shape
) -> torch.Tensor:
    """The outputs of all chunks, gated norm, projection and MLP."""
    out = q @ states + scores @ v  # [N, B, HV, C, DV]
    out = out.movedim(3, 2).movedim(0, 1).flatten(1, 2)  # [B, T, HV, DV]
    return mlp(x + gated_out(out, z, w, shape), w, shape)


def gated_out(out: torch.Tensor, z: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    normed = F.rms_norm(out.float(), (shape.v_head_dim,), eps=shape.rms_eps) * w["linear_attn.norm.weight"].float()
    gates = F.silu(z.float()).unflatten(-1, (shape.num_v_heads, shape.v_head_dim))
    return linear((normed * gates).to(z.dtype).flatten(-2), w["linear_attn.out_proj.weight"])


def delta_layer(x: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    z, q, scores, values, keys_in, keys_out, gamma = FUNCTIONS["delta_prepare"](x, w, shape)
    lead = values.shape[:3]
    v, states = scan_chunks(*(t.flatten(1, 2) for t in (values, keys_in, keys_out, gamma)))
    return FUNCTIONS["delta_finish"](x, z, q, scores, v.unflatten(1, lead[1:]), states.unflatten(1, lead[1:]), w, shape)


def trunk(ids: torch.Tensor, weights: Weights, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states after the final norm, `[B, T, H]`; T is a multiple of the chunk."""
    x = F.embedding(ids, weights["model.embed_tokens.weight"]).to(dtype)
    cos, sin = rotation(torch.arange(ids.shape[1], device=ids.device), shape)
    for i in range(shape.num_layers):
        w = under(weights, f"model.layers.{i}.")
        x = delta_layer(x, w, shape) if shape.is_linear(i) else FUNCTIONS["attention_layer"](x, w, cos, sin, shape)
    return norm(x, weights["model.norm.weight"], shape.rms_eps)


def predict_two_ahead(hidden: torch.Tensor, next_ids: torch.Tensor, weights: Weights, shape: Shape) -> torch.Tensor:
    """The multi-token-prediction layer: of the trunk's `[B, T, H]` and each token's successor, the hidden states that predict the token after that."""
    embedded = F.embedding(next_ids, weights["model.embed_tokens.weight"]).to(hidden.dtype)
    pair = (norm(embedded, weights["mtp.pre_fc_norm_embedding.weight"], shape.rms_eps), norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"], shape.rms_eps))
    cos, sin = rotation(torch.arange(hidden.shape[1], device=hidden.device), shape)
    x = FUNCTIONS["attention_layer"](linear(torch.cat(pair, -1), weights["mtp.fc.weight"]), under(weights, "mtp.layers.0."), cos, sin, shape)
    return norm(x, weights["mtp.norm.weight"], shape.rms_eps)


def logits(hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
    return linear(hidden, weights["model.embed_tokens.weight"])


def head_loss(hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of `[B, T, H]` against targets `[B, T]`, weighed by shares `[B, T]`."""
    losses = F.cross_entropy(linear(hidden, embedding).float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * shares.flatten()).sum() / shares.sum()


# Compiled one by one, not as a whole: every layer of a kind runs the same code, so that compiling takes a minute and not ten.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "delta_prepare": delta_prepare,
    "delta_finish": delta_finish,
    "attention_layer": attention_layer,
    "head_loss": head_loss,
}


PLAIN = dict(FUNCTIONS)


def compile_functions() -> None:
    for name, function in PLAIN.items():
        FUNCTIONS[name] = torch.compile(function, dynamic=False)


def use_plain_functions() -> None:
    """For other shapes than training's, which would be compiled anew."""
    FUNCTIONS.update(PLAIN)
