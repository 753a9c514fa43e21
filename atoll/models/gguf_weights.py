"""A GGUF file of a Llama or Qwen3 under Hugging Face names and in the half-split rotary convention."""

import re
from collections.abc import Collection

import torch

from atoll.models.gguf_file import GGUFFile
from atoll.models.model_config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"  # rope scaling as a table: not a weight of the model

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's converter reorders the rows of q and k of these; the others' are half-split, as in the folder that they came from.
_INTERLEAVED = ("llama", "mistral")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GGUFWeights:
    """A `WeightSource` over a GGUF file; a name that is not in the tables passes through, to be reported as unexpected."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._own_names = {hf_name(name): name for name in file.names() if name != ROPE_FACTORS}
        reordered = {"q_proj.weight": config.num_q_heads, "k_proj.weight": config.num_kv_heads}
        self._heads = reordered if config.model_type in _INTERLEAVED else {}

    def names(self) -> Collection[str]:
        return self._own_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._own_names[name])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._file.read(self._own_names[name], dtype)
        num_heads = self._heads.get(name.rpartition("self_attn.")[2])
        return tensor if num_heads is None else half_split(tensor, num_heads)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; itself when there is none."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    return _OUTER.get(name, name)


def half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k from GGUF's order (partners in a rotation side by side) to ours (half a head apart)."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
