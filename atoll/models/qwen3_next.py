"""Qwen3-Next: a hybrid decoder with mixtures of experts, whose linear-attention projections are stored packed by key head."""

from atoll.models.hybrid_decoder import HybridDecoder


class Qwen3NextModel(HybridDecoder):
    """Tensors `in_proj_qkvz` and `in_proj_ba`; a few layers may have a dense MLP."""

    has_packed_projections = True
