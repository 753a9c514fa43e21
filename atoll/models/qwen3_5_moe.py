"""Qwen3.5 MoE, its text decoder: Qwen3.5 with a mixture of experts in every layer, stored expert by expert or fused."""

from atoll.models.hybrid_decoder import HybridDecoder


class Qwen3_5MoeModel(HybridDecoder):
    """As Qwen3.5; the weights of a token's experts always sum to 1."""
