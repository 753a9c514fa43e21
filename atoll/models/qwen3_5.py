"""Qwen3.5 (dense), its text decoder: a hybrid decoder with dense MLPs, whose linear-attention projections are stored one by one."""

from atoll.models.hybrid_decoder import HybridDecoder


class Qwen3_5Model(HybridDecoder):
    """Tensors `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`; the image encoder and the multi-token-prediction head are left unread."""
