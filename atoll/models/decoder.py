"""The decoder that every model type is a case of: tokens and positions in, hidden states and logits out; knows no page and no batch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from atoll.models.attention_layer import AttentionKind, AttentionLayer, attention_shapes
from atoll.models.base import Attend, Delta, Pass, WeightSource
from atoll.models.linear import Linear
from atoll.models.mlp import DenseMLP, mlp_shapes
from atoll.models.model_config import ModelConfig
from atoll.models.norm import RMSNorm, read_scale
from atoll.models.rotary import inverse_frequencies, rotation
from atoll.models.weight_reader import Shapes, WeightReader, prefixed, text_root

Mixer = Callable[[torch.Tensor, Pass], torch.Tensor]
MLP = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DecoderLayer:
    """A mixer, in which tokens see each other, and an MLP, in which they do not; each reads a norm of the stream and adds to it."""

    mixer_norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: torch.Tensor, shared: Pass) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x), shared)
        return x + self.mlp(self.mlp_norm(x))


class DecoderBase:
    """Inference only: plain tensors, no host sync and no data-dependent host code, so that a CUDA graph can capture it.

    A model type names its kind of attention and of norm scales; one whose mixers or MLPs differ overrides the four methods for them.
    """

    attention: ClassVar[AttentionKind] = AttentionKind()
    zero_centred_norms: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        outer = WeightReader(weights, device, dtype)
        read = outer.under(text_root(weights.names()))
        self.embedding = read("embed_tokens.weight")  # [V, H]
        self.layers = [self._read_layer(i, read.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.final_norm = self._read_norm(read, "norm.weight")
        self.lm_head = Linear(self.embedding if config.tie_embeddings else outer("lm_head.weight"))  # [V, H]
        self.inv_freq = inverse_frequencies(config).to(device)  # [rotary dim / 2] fp32

    @property
    def waits_for_device(self) -> bool:
        return False

    @classmethod
    def tensor_shapes(cls, config: ModelConfig, held: Collection[str] = ()) -> Shapes:
        """Every tensor that a checkpoint of this config holds. `held` are the names in the one at hand: they tell which spelling it uses."""
        hidden = config.hidden_size
        shapes: Shapes = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
        for i in range(config.num_layers):
            layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
            layer |= cls._mixer_shapes(config, i) | prefixed("mlp.", cls._mlp_shapes(config, i, held))
            shapes |= prefixed(f"layers.{i}.", layer)
        head: Shapes = {} if config.tie_embeddings else {"lm_head.weight": (config.vocab_size, hidden)}
        return prefixed(text_root(held), shapes) | head

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` fp32 from hidden states `[N, H]`: pass only the rows that are sampled."""
        return self.lm_head(self.final_norm(hidden)).float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, delta: Delta | None = None) -> torch.Tensor:
        shared = Pass(*rotation(positions, self.inv_freq), attend, delta)
        x = F.embedding(token_ids, self.embedding)  # [T, H]
        for layer in self.layers:
            x = layer(x, shared)
        return x

    def _read_layer(self, index: int, read: WeightReader) -> DecoderLayer:
        return DecoderLayer(
            mixer_norm=self._read_norm(read, "input_layernorm.weight"),
            mixer=self._read_mixer(index, read),
            mlp_norm=self._read_norm(read, "post_attention_layernorm.weight"),
            mlp=self._read_mlp(index, read.under("mlp.")),
        )

    def _read_norm(self, read: WeightReader, name: str) -> RMSNorm:
        return RMSNorm(read_scale(read, name, zero_centred=self.zero_centred_norms), self.config.rms_eps)

    @classmethod
    def _mixer_shapes(cls, config: ModelConfig, index: int) -> Shapes:
        return prefixed("self_attn.", attention_shapes(config, cls.attention))

    def _read_mixer(self, index: int, read: WeightReader) -> Mixer:
        return AttentionLayer(index, self.config, self.attention, read.under("self_attn."), zero_centred_norms=self.zero_centred_norms)

    @classmethod
    def _mlp_shapes(cls, config: ModelConfig, index: int, held: Collection[str]) -> Shapes:
        return mlp_shapes(config.hidden_size, config.intermediate_size)

    def _read_mlp(self, index: int, read: WeightReader) -> MLP:
        return DenseMLP(read)


class AttentionDecoder(DecoderBase):
    """Every layer attends."""

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attend: Attend,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` before the final norm. `attend` is called once per layer, in order, with rotated q and k."""
        return self._run(token_ids, positions, attend)
