"""The Llama family (Llama, SmolLM2, Mistral): tokens and positions in, hidden states and logits out; knows no page and no batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atoll.models.base import Attend, WeightSource
from atoll.models.linear import Linear
from atoll.models.model_config import ModelConfig
from atoll.models.rotary import inverse_frequencies, rotate, rotation


@dataclass(frozen=True)
class LlamaLayer:
    """One decoder layer's weights; projections that read the same input are one matrix."""

    attention_norm: torch.Tensor  # [H]
    qkv: Linear  # [(HQ + 2 HKV) * D, H]
    attention_out: Linear  # [H, HQ * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: Linear  # [2 * I, H]
    down: Linear  # [H, I]


class LlamaModel:
    """Inference only: plain tensors, no host sync and no data-dependent host code, so that a CUDA graph can capture it."""

    def __init__(self, config: ModelConfig, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype

        def read(*names: str) -> torch.Tensor:
            parts = [weights.read(name, dtype) for name in names]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)

        self.embedding = read("model.embed_tokens.weight")  # [V, H]
        self.layers = [_read_layer(read, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.final_norm = read("model.norm.weight")  # [H]
        self.lm_head = Linear(self.embedding if config.tie_embeddings else read("lm_head.weight"))  # [V, H]
        self.inv_freq = inverse_frequencies(config).to(device)  # [D / 2] fp32

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this config holds."""
        hidden, inter = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for i in range(config.num_layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[layer + "self_attn.q_proj.weight"] = (q_rows, hidden)
            shapes[layer + "self_attn.k_proj.weight"] = (kv_rows, hidden)
            shapes[layer + "self_attn.v_proj.weight"] = (kv_rows, hidden)
            shapes[layer + "self_attn.o_proj.weight"] = (hidden, q_rows)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            shapes[layer + "mlp.gate_proj.weight"] = (inter, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (inter, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, inter)
        return shapes

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attend: Attend,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` before the final norm. `attend` is called once per layer, in order, with rotated q and k."""
        cos, signed_sin = rotation(positions, self.inv_freq)
        x = F.embedding(token_ids, self.embedding)  # [T, H]
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer, self._norm(x, layer.attention_norm), cos, signed_sin, attend)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)  # [T, I] each
            x = x + layer.down(F.silu(gate) * up)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32 from hidden states `[N, H]`: pass only the rows that are sampled."""
        return self.lm_head(self._norm(hidden, self.final_norm)).float()

    def _attention(self, index: int, layer: LlamaLayer, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        num_q, num_kv = self.config.num_q_heads, self.config.num_kv_heads
        heads = layer.qkv(x).view(-1, num_q + 2 * num_kv, self.config.head_dim)
        # q and k turn alike: one rotation for both.
        rotated = rotate(heads[:, : num_q + num_kv], cos, signed_sin)
        out = attend(index, rotated[:, :num_q], rotated[:, num_q:], heads[:, num_q + num_kv :])  # [T, HQ, D]
        return layer.attention_out(out.reshape(x.shape[0], -1))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # torch accumulates 16-bit inputs in fp32 here.
        return F.rms_norm(x, weight.shape, weight, self.config.rms_eps)


def _read_layer(read: Callable[..., torch.Tensor], prefix: str) -> LlamaLayer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LlamaLayer(
        attention_norm=read(prefix + "input_layernorm.weight"),
        qkv=Linear(read(*(f"{attention}{part}_proj.weight" for part in "qkv"))),
        attention_out=Linear(read(attention + "o_proj.weight")),
        mlp_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=Linear(read(mlp + "gate_proj.weight", mlp + "up_proj.weight")),
        down=Linear(read(mlp + "down_proj.weight")),
    )
