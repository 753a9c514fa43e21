"""Tiny random checkpoints: a folder as transformers writes it."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "he"]
VOCAB_SIZE = 300  # the tokens, and padding as models have it
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    # Large weights: with transformers' 0.02 a wrong rotation or mask hardly shows in the logits.
    "initializer_range": 0.2,
}


MODEL_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}


def make_folder(folder: Path, model_type: str = "llama", *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Write a random model with its tokenizer; returns transformers' own model of it, fp32."""
    torch.manual_seed(0)
    config_class, model_class = MODEL_CLASSES[model_type]
    model = model_class(config_class(**{**SHAPE, **changes})).eval()
    randomize(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return model


def randomize(model: Any) -> None:
    """Away from transformers' initial values, where they would hide a fault."""
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all 1, or 0 where zero-centred, otherwise: a norm's weight that is left out would not show
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5)
        elif name.endswith("A_log"):  # slow decay: a state that is forgotten at once hides how it came about, and costs the oracle's chunks digits
            torch.nn.init.uniform_(parameter, -5.0, -1.0)
        elif name.endswith("dt_bias"):
            torch.nn.init.uniform_(parameter, -1.0, 1.0)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> Backend:
    """Byte-level, one merge, BOS in front."""
    backend = Backend(models.BPE({token: i for i, token in enumerate(TOKENS)}, [("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 256)])
    return backend
