"""What a model's config says, in one vocabulary, whether it came from a Hugging Face folder or from GGUF metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atoll.errors import ModelError

ROPE_SCALINGS = ("default", "linear", "llama3")

_HYBRID_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# What Hugging Face's config class assumes for a key that config.json leaves out.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_next": _HYBRID_DEFAULTS
    | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "qwen3_5": _HYBRID_DEFAULTS | {"num_key_value_heads": 4},
    "qwen3_5_moe": _HYBRID_DEFAULTS
    | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_MIXTURES = ("qwen3_next", "qwen3_5_moe")
# The text part of a model with an image encoder, saved alone.
_TEXT_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


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
class DeltaShape:
    """The linear-attention layers of a hybrid model: a causal conv and the gated delta rule."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int  # tokens

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ModelError(
                f"the model's config gives {self.num_v_heads} value heads for {self.num_k_heads} key heads in linear attention; it must be a multiple"
            )

    @property
    def value_dim(self) -> int:
        """Channels of v, and of the output, over all heads."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of q, k and v over all heads: what the conv runs over."""
        return 2 * self.num_k_heads * self.k_head_dim + self.value_dim


@dataclass(frozen=True)
class MoEShape:
    """The mixtures of experts of a model that has them."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # intermediate size of each
    shared_expert_size: int  # intermediate size
    normalize_weights: bool  # whether the weights of a token's experts are scaled to sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with a dense MLP instead

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ModelError(f"the model's config sends a token to {self.experts_per_token} experts of {self.num_experts}; it cannot be more than there are")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. `window` counts the query itself, as in the attention spec."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of dense MLPs; 0 where there are none
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
    rotary_dim: int | None = None  # leading dimensions of a head that turn; None: all
    linear_layers: tuple[int, ...] = ()  # those that are linear attention; the others attend
    delta: DeltaShape | None = None  # given where there are linear layers
    moe: MoEShape | None = None  # None: every MLP is dense
    fp8_block: tuple[int, int] | None = None  # rows and columns that share a scale in the checkpoint's fp8 weights; None: no weight is fp8

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(f"the model's config gives {self.num_q_heads} query heads for {self.num_kv_heads} KV heads; it must be a multiple")
        if self.head_dim % 2:
            raise ModelError(f"the model's config gives head_dim {self.head_dim}; rotary embedding needs an even one")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ModelError(f"the model's config turns {self.rotary_dim} of {self.head_dim} head dimensions; it must be an even number of them, at least 2")

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values; `attend` counts these."""
        return self.num_layers - len(self.linear_layers)

    def is_linear(self, layer: int) -> bool:
        return layer in self.linear_layers


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of config.json and, where there is one, generation_config.json. Of a model with an image encoder, the text part."""
    model_type = str(canonical_model_type(config.get("model_type")))
    config = _text_part(config)
    # A null is as good as a key left out: Hugging Face writes both.
    given = _HF_DEFAULTS.get(model_type, {}) | {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    _refuse_hf(given)
    num_q_heads = _count(given, "num_attention_heads")
    hidden_size = _count(given, "hidden_size")
    rope = given.get("rope_parameters") or (given.get("rope_scaling") or {}) | {"rope_theta": given.get("rope_theta", 10000.0)}
    head_dim = _count(given, "head_dim", hidden_size // num_q_heads)
    linear_layers = _hf_linear_layers(given) if model_type in _HYBRIDS else ()
    moe = _hf_moe(given, model_type) if model_type in _MIXTURES else None
    return ModelConfig(
        model_type=model_type,
        num_layers=_count(given, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_count(given, "intermediate_size") if moe is None or moe.dense_layers else 0,
        num_q_heads=num_q_heads,
        num_kv_heads=_count(given, "num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        vocab_size=_count(given, "vocab_size"),
        max_position=_count(given, "max_position_embeddings"),
        rope_theta=_number(rope, "rope_theta", 10000.0),
        rms_eps=_number(given, "rms_norm_eps"),
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        eos_token_ids=_merge_ids((generation or {}).get("eos_token_id"), given.get("eos_token_id")),
        rope_scaling=_hf_rope_scaling(rope),
        window=_hf_window(given),
        rotary_dim=_hf_rotary_dim(given, rope, head_dim, is_hybrid=model_type in _HYBRIDS),
        linear_layers=linear_layers,
        delta=_hf_delta(given) if linear_layers else None,
        moe=moe,
        fp8_block=_hf_fp8_block(given.get("quantization_config")),
    )


def canonical_model_type(model_type: object) -> object:
    """The model_type whose file computes it; anything unknown is returned as it is."""
    return _TEXT_TYPES.get(model_type, model_type) if isinstance(model_type, str) else model_type


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


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise ModelError(f"the model's config gives text_config = {text!r}; it must be an object, so the file is damaged")
    # The output matrix stands beside the text model, so the outer config says whether it is tied.
    return {**config, **text, "tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings"))}


def _refuse_hf(given: Mapping[str, Any]) -> None:
    """Raise for what would load and compute something else than the model."""
    if given.get("hidden_act", "silu") != "silu":
        raise ModelError(f"the model's config gives hidden_act {given['hidden_act']!r}; only 'silu' is supported")
    if not given.get("attn_output_gate", True):
        raise ModelError("the model's config gives attn_output_gate = false; only attention with an output gate is supported for this model type")
    for key in ("attention_bias", "mlp_bias"):
        if given.get(key):
            raise ModelError(f"the model's config gives {key} = true; only projections without bias are supported")


def _hf_fp8_block(quantization: Any) -> tuple[int, int] | None:
    """Block-wise fp8 is the one quantization that is read. How activations are quantized does not matter: they are not."""
    if not quantization:
        return None
    remedy = "use an unquantized safetensors folder, one in block-wise fp8 (as Qwen's FP8 checkpoints are), or a GGUF file"
    if not isinstance(quantization, Mapping):
        raise ModelError(f"the model's config gives quantization_config = {quantization!r}; it must be an object, so the file is damaged")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        raise ModelError(f"the checkpoint is quantized by method {method!r}; only 'fp8' with a weight_block_size is supported, {remedy}")
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"the checkpoint holds fp8 of format {quantization['fmt']!r}; only 'e4m3' is supported, {remedy}")
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(size, int) and size >= 1 for size in block)):
        raise ModelError(f"the checkpoint holds fp8 with weight_block_size {block!r}; it must be two whole numbers of at least 1, {remedy}")
    return block[0], block[1]


def _hf_window(given: Mapping[str, Any]) -> int | None:
    # Qwen's configs name a window and then say whether it is used.
    if given.get("sliding_window") is None or not given.get("use_sliding_window", True):
        return None
    if "use_sliding_window" in given:
        raise ModelError(f"the model's config gives use_sliding_window = {given['use_sliding_window']!r}; windows on a part of the layers are not supported")
    return _count(given, "sliding_window")


def _hf_linear_layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = _count(given, "num_hidden_layers")
    kinds = given.get("layer_types")
    if kinds is None:
        interval = _count(given, "full_attention_interval")
        return tuple(i for i in range(num_layers) if (i + 1) % interval)
    unknown = [kind for kind in kinds if kind not in ("linear_attention", "full_attention")]
    if unknown:
        raise ModelError(f"the model's config has a layer of type {unknown[0]!r}; supported: linear_attention, full_attention")
    if len(kinds) != num_layers:
        raise ModelError(f"the model's config names the types of {len(kinds)} layers and has num_hidden_layers = {num_layers}; the file is damaged")
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def _hf_delta(given: Mapping[str, Any]) -> DeltaShape:
    return DeltaShape(
        num_k_heads=_count(given, "linear_num_key_heads"),
        num_v_heads=_count(given, "linear_num_value_heads"),
        k_head_dim=_count(given, "linear_key_head_dim"),
        v_head_dim=_count(given, "linear_value_head_dim"),
        conv_width=_count(given, "linear_conv_kernel_dim"),
    )


def _hf_moe(given: Mapping[str, Any], model_type: str) -> MoEShape:
    dense_layers: tuple[int, ...] = ()
    normalize_weights = True
    if model_type == "qwen3_next":  # the only one that leaves these open
        dense, step = given.get("mlp_only_layers") or (), _count(given, "decoder_sparse_step", 1)
        dense_layers = tuple(i for i in range(_count(given, "num_hidden_layers")) if i in dense or (i + 1) % step)
        normalize_weights = bool(given.get("norm_topk_prob", True))
    return MoEShape(
        num_experts=_count(given, "num_experts"),
        experts_per_token=_count(given, "num_experts_per_tok"),
        expert_size=_count(given, "moe_intermediate_size"),
        shared_expert_size=_count(given, "shared_expert_intermediate_size"),
        normalize_weights=normalize_weights,
        dense_layers=dense_layers,
    )


def _hf_rotary_dim(given: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int, *, is_hybrid: bool) -> int | None:
    factor = _number(rope, "partial_rotary_factor", _number(given, "partial_rotary_factor", 1.0))
    if factor == 1.0:
        return None
    if not is_hybrid:
        raise ModelError(f"the model's config gives partial_rotary_factor = {factor}; for this model type only 1 is supported")
    return int(head_dim * factor)


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
