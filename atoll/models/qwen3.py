"""Qwen3 (dense): Llama with an RMS norm over each query and each key head."""

from atoll.models.attention_layer import AttentionKind
from atoll.models.decoder import AttentionDecoder


class Qwen3Model(AttentionDecoder):
    """As published, without bias, and without windows on a part of the layers."""

    attention = AttentionKind(has_head_norms=True)
