"""A tiny random checkpoint as GGUF, laid out as llama.cpp's converter does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.tiny import TOKENS, VOCAB_SIZE


def make_gguf(path: Path, model: Any, *, rope_factors: Sequence[float] = (), drop: str | None = None, **metadata: Any) -> None:
    """Write transformers' model as llama.cpp's converter lays it out; `drop` leaves one tensor out, `metadata` adds or changes keys."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    keys: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.attention.key_length": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.add_bos_token": True,
    }
    for key, value in (keys | metadata).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}[type(value)](key, value)
    num_pads = VOCAB_SIZE - len(TOKENS)
    writer.add_token_list([*TOKENS, *(f"<pad{i}>" for i in range(num_pads))])
    writer.add_token_types([1] * 256 + [3, 3, 1] + [5] * num_pads)
    writer.add_token_merges(["h e"])
    for name, tensor in gguf_tensors(model).items():
        if name != drop:
            writer.add_tensor(name, tensor)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The weights under GGUF's names; of a Llama, rows of q and k with rotation partners side by side, as llama.cpp wants them."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads} if model.config.model_type == "llama" else {}
    tensors = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if name in outer:
            tensors[outer[name]] = value
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        own = names[part]
        if own in heads:
            value = np.ascontiguousarray(value.reshape(heads[own], 2, -1, value.shape[1]).swapaxes(1, 2)).reshape(value.shape)
        tensors[f"blk.{layer}.{own}.weight"] = value
    return tensors
