"""The Llama family (Llama, SmolLM2, Mistral): the plain decoder, every layer of which attends."""

from atoll.models.decoder import AttentionDecoder


class LlamaModel(AttentionDecoder):
    """Grouped-query attention over rotated heads, dense MLPs, no bias anywhere."""
