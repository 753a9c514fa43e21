"""What a model's config says, in one vocabulary, whether it came from a Hugging Face folder or from GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atoll.errors import ModelError

ROPE_SCALINGS = ("default", "linear", "llama3")

# What Hugging Face's config class assumes for a key that config.json leaves out.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
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
        counts = ("num_layers", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")
        for name in counts:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"the model's config gives {name} = {value!r}; it must be a whole number of at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(f"the model's config gives {self.num_q_heads} query heads for {self.num_kv_heads} KV heads; it must be a multiple")
        if self.head_dim % 2:
            raise ModelError(f"the model's config gives head_dim {self.head_dim}; rotary embedding needs an even one")


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of config.json and, where there is one, generation_config.json."""
    model_type = config.get("model_type")
    given = {**_HF_DEFAULTS.get(str(model_type), {}), **config}
    _refuse_hf(given)
    num_q_heads = _need(given, "num_attention_heads")
    hidden_size = _need(given, "hidden_size")
    rope = given.get("rope_parameters") or {**(given.get("rope_scaling") or {}), "rope_theta": given.get("rope_theta")}
    return ModelConfig(
        model_type=str(model_type),
        num_layers=_need(given, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_need(given, "intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=given.get("num_key_value_heads") or num_q_heads,
        head_dim=given.get("head_dim") or hidden_size // num_q_heads,
        vocab_size=_need(given, "vocab_size"),
        max_position=given["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rms_eps=given["rms_norm_eps"],
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        eos_token_ids=_merge_ids((generation or {}).get("eos_token_id"), given.get("eos_token_id")),
        rope_scaling=_hf_rope_scaling(rope),
        window=given.get("sliding_window"),
    )


def config_from_gguf(metadata: Mapping[str, Any], *, vocab_size: int, tie_embeddings: bool, rope_factors: tuple[float, ...] = ()) -> ModelConfig:
    """From a GGUF file's metadata and the three facts that only its tensors tell."""
    arch = metadata.get("general.architecture")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        return _need(metadata, f"{arch}.{key}")

    if get("expert_count", 0):
        raise ModelError(f"the GGUF file holds {get('expert_count')} experts per layer; mixtures of experts are not supported, dense models are")
    num_q_heads = need("attention.head_count")
    hidden_size = need("embedding_length")
    head_dim = get("attention.key_length") or hidden_size // num_q_heads
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"the GGUF file rotates {get('rope.dimension_count')} of {head_dim} head dimensions; partial rotary embedding is not supported")
    return ModelConfig(
        model_type=str(arch),
        num_layers=need("block_count"),
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=get("attention.head_count_kv") or num_q_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=need("context_length"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rms_eps=need("attention.layer_norm_rms_epsilon"),
        tie_embeddings=tie_embeddings,
        eos_token_ids=_merge_ids(metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")),
        rope_scaling=_gguf_rope_scaling(get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0), rope_factors),
        window=get("attention.sliding_window") or None,
    )


def _need(given: Mapping[str, Any], key: str) -> Any:
    if given.get(key) is None:
        raise ModelError(f"the model's config has no {key!r}; it is needed, so the file is damaged or of another format")
    return given[key]


def _refuse_hf(given: Mapping[str, Any]) -> None:
    """Raise for what would load and compute something else than the model."""
    if given.get("quantization_config"):
        method = given["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"the checkpoint is quantized ({method}); use an unquantized safetensors folder, or a GGUF file")
    if given.get("hidden_act", "silu") != "silu":
        raise ModelError(f"the model's config gives hidden_act {given['hidden_act']!r}; only 'silu' is supported")
    for key in ("attention_bias", "mlp_bias"):
        if given.get(key):
            raise ModelError(f"the model's config gives {key} = true; only projections without bias are supported")


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_SCALINGS:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_SCALINGS)}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(_need(rope, "factor")))
    return RopeScaling(
        "llama3",
        factor=float(_need(rope, "factor")),
        low_freq_factor=float(_need(rope, "low_freq_factor")),
        high_freq_factor=float(_need(rope, "high_freq_factor")),
        original_max_position=int(_need(rope, "original_max_position_embeddings")),
    )


def _gguf_rope_scaling(kind: str, factor: float, factors: tuple[float, ...]) -> RopeScaling | None:
    if factors:
        return RopeScaling("factors", factors=factors)
    if kind == "linear":
        return RopeScaling("linear", factor=float(factor))
    if kind != "none":
        raise ModelError(f"rope scaling {kind!r} of the GGUF file is not supported; supported: none, linear, rope_freqs.weight")
    return None


def _merge_ids(*given: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for item in given:
        ids += [item] if isinstance(item, int) else (item or [])
    return tuple(dict.fromkeys(ids))
