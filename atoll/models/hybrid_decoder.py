"""The decoder of Qwen's hybrid models: linear-attention layers between gated full-attention layers; knows no page, no slot and no batch."""

from collections.abc import Collection
from typing import ClassVar

import torch

from atoll.models.attention_layer import AttentionKind
from atoll.models.base import Attend, Delta
from atoll.models.decoder import MLP, DecoderBase, Mixer
from atoll.models.delta_layer import DeltaLayer, delta_shapes
from atoll.models.model_config import DeltaShape, ModelConfig
from atoll.models.moe import SparseMoE, grouped_product_waits, moe_shapes
from atoll.models.weight_reader import Shapes, WeightReader, prefixed


class HybridDecoder(DecoderBase):
    """Which layers are linear attention and which hold experts, the config says; how the projections are stored, the model type."""

    attention = AttentionKind(has_head_norms=True, is_gated=True)
    zero_centred_norms = True
    has_packed_projections: ClassVar[bool] = False

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attend: Attend,
        delta: Delta,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` before the final norm. Each layer calls `attend`, with rotated q and k, or `delta`; each of the two counts its own layers."""
        return self._run(token_ids, positions, attend, delta)

    @property
    def waits_for_device(self) -> bool:
        return self.config.moe is not None and grouped_product_waits(self.device, self.dtype)

    @classmethod
    def _mixer_shapes(cls, config: ModelConfig, index: int) -> Shapes:
        if not config.is_linear(index):
            return super()._mixer_shapes(config, index)
        return prefixed("linear_attn.", delta_shapes(config.hidden_size, _delta_shape(config), is_packed=cls.has_packed_projections))

    def _read_mixer(self, index: int, read: WeightReader) -> Mixer:
        config = self.config
        num_linear_before = sum(config.is_linear(i) for i in range(index))
        if not config.is_linear(index):
            return super()._read_mixer(index - num_linear_before, read)
        linear = read.under("linear_attn.")
        return DeltaLayer(num_linear_before, _delta_shape(config), config.rms_eps, linear, is_packed=self.has_packed_projections)

    @classmethod
    def _mlp_shapes(cls, config: ModelConfig, index: int, held: Collection[str]) -> Shapes:
        if config.moe is None or index in config.moe.dense_layers:
            return super()._mlp_shapes(config, index, held)
        return moe_shapes(config.hidden_size, config.moe, held)

    def _read_mlp(self, index: int, read: WeightReader) -> MLP:
        moe = self.config.moe
        return super()._read_mlp(index, read) if moe is None or index in moe.dense_layers else SparseMoE(moe, read)


def _delta_shape(config: ModelConfig) -> DeltaShape:
    assert config.delta is not None
    return config.delta
