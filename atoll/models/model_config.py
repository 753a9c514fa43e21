"""What a model's config says, in one vocabulary, whether it came from a Hugging Face folder or from GGUF metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atoll.errors import ModelError

ROPE_SCALINGS = ("default", "linear", "llama3")

# What Hugging Face's config class assumes for a key that config.json leaves out.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0  # linear, llama3: the longest wavelengths grow by this
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_max_position / this grow in full
    high_freq_factor: float = 1.0  # llama3: wavelengths below original_max_position / this stay
    original_max_position: int = 0  # llama3
    factors: tuple[float, ...] = ()  # factors: each frequency's own divisor, [D / 2]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. `window` counts the query itself, as in the attention spec."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # tokens
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    window: int | None = None  # keys a query sees, itself included; None: all

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(f"the model's config gives {self.num_q_heads} query heads for {self.num_kv_heads} KV heads; it must be a multiple")
        if self.head_dim % 2:
            raise ModelError(f"the model's config gives head_dim {self.head_dim}; rotary embedding needs an even one")


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of config.json and, where there is one, generation_config.json."""
    model_type = str(config.get("model_type"))
    # A null is as good as a key left out: Hugging Face writes both.
    given = _HF_DEFAULTS.get(model_type, {}) | {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    _refuse_hf(given)
    num_q_heads = _count(given, "num_attention_heads")
    hidden_size = _count(given, "hidden_size")
    rope = given.get("rope_parameters") or (given.get("rope_scaling") or {}) | {"rope_theta": given.get("rope_theta", 10000.0)}
    return ModelConfig(
        model_type=model_type,
        num_layers=_count(given, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_count(given, "intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=_count(given, "num_key_value_heads", num_q_heads),
        head_dim=_count(given, "head_dim", hidden_size // num_q_heads),
        vocab_size=_count(given, "vocab_size"),
        max_position=_count(given, "max_position_embeddings"),
        rope_theta=_number(rope, "rope_theta", 10000.0),
        rms_eps=_number(given, "rms_norm_eps"),
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        eos_token_ids=_merge_ids((generation or {}).get("eos_token_id"), given.get("eos_token_id")),
        rope_scaling=_hf_rope_scaling(rope),
        window=_hf_window(given),
    )


def config_from_gguf(metadata: Mapping[str, Any], *, vocab_size: int, tie_embeddings: bool, rope_factors: tuple[float, ...] = ()) -> ModelConfig:
    """From a GGUF file's metadata and the three facts that only its tensors tell."""
    model_type = str(metadata.get("general.architecture"))
    given = {key.removeprefix(model_type + "."): value for key, value in metadata.items() if key.startswith(model_type + ".")}
    if given.get("expert_count"):
        raise ModelError(f"the GGUF file holds {given['expert_count']} experts per layer; mixtures of experts are not supported, dense models are")
    num_q_heads = _count(given, "attention.head_count")
    hidden_size = _count(given, "embedding_length")
    head_dim = _count(given, "attention.key_length", hidden_size // num_q_heads)
    if given.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"the GGUF file rotates {given['rope.dimension_count']} of {head_dim} head dimensions; all or none is supported")
    return ModelConfig(
        model_type=model_type,
        num_layers=_count(given, "block_count"),
        hidden_size=hidden_size,
        intermediate_size=_count(given, "feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=_count(given, "attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=_count(given, "context_length"),
        rope_theta=_number(given, "rope.freq_base", 10000.0),
        rms_eps=_number(given, "attention.layer_norm_rms_epsilon"),
        tie_embeddings=tie_embeddings,
        eos_token_ids=_merge_ids(metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")),
        rope_scaling=_gguf_rope_scaling(given, rope_factors, head_dim),
        window=_count(given, "attention.sliding_window") if given.get("attention.sliding_window") else None,
    )


def _count(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if value is None:
        raise ModelError(f"the model's config has no {key!r}; it is needed, so the file is damaged or of another format")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the model's config gives {key} = {value!r}; it must be a whole number of at least 1")
    return value


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = given.get(key, default)
    if value is None:
        raise ModelError(f"the model's config has no {key!r}; it is needed, so the file is damaged or of another format")
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"the model's config gives {key} = {value!r}; it must be a positive number")
    return float(value)


def _refuse_hf(given: Mapping[str, Any]) -> None:
    """Raise for what would load and compute something else than the model."""
    if given.get("quantization_config"):
        raise ModelError(f"the checkpoint is quantized ({given['quantization_config']}); use an unquantized safetensors folder, or a GGUF file")
    if given.get("hidden_act", "silu") != "silu":
        raise ModelError(f"the model's config gives hidden_act {given['hidden_act']!r}; only 'silu' is supported")
    for key in ("attention_bias", "mlp_bias"):
        if given.get(key):
            raise ModelError(f"the model's config gives {key} = true; only projections without bias are supported")


def _hf_window(given: Mapping[str, Any]) -> int | None:
    # Qwen's configs name a window and then say whether it is used.
    if given.get("sliding_window") is None or not given.get("use_sliding_window", True):
        return None
    if "use_sliding_window" in given:
        raise ModelError(f"the model's config gives use_sliding_window = {given['use_sliding_window']!r}; windows on a part of the layers are not supported")
    return _count(given, "sliding_window")


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_SCALINGS:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_SCALINGS)}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=_number(rope, "factor"))
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope scaling has low_freq_factor {low} and high_freq_factor {high}; the second must be greater")
    return RopeScaling(
        "llama3", _number(rope, "factor"), low_freq_factor=low, high_freq_factor=high, original_max_position=_count(rope, "original_max_position_embeddings")
    )


def _gguf_rope_scaling(given: Mapping[str, Any], factors: tuple[float, ...], head_dim: int) -> RopeScaling | None:
    if factors:
        if len(factors) != head_dim // 2:
            raise ModelError(f"rope_freqs.weight has {len(factors)} factors, head_dim {head_dim} has {head_dim // 2} frequencies; the file is damaged")
        return RopeScaling("factors", factors=factors)
    kind = given.get("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=_number(given, "rope.scaling.factor"))
    if kind != "none":
        raise ModelError(f"rope scaling {kind!r} of the GGUF file is not supported; supported: none, linear, rope_freqs.weight")
    return None


def _merge_ids(*given: Any) -> tuple[int, ...]:
    ids = [token_id for item in given for token_id in (item if isinstance(item, list) else [item]) if token_id is not None]
    wrong = [token_id for token_id in ids if not isinstance(token_id, int)]
    if wrong:
        raise ModelError(f"the model's config gives eos_token_id = {wrong[0]!r}; it must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))
