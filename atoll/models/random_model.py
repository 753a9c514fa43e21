"""Models with random weights, made where they run: the shape of a published model, to time and to serve without its checkpoint. Knows no clock."""

import importlib
import os
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from atoll.errors import ModelError
from atoll.models.base import HybridModel, Model
from atoll.models.loader import MODELS, RANDOM, LoadedModel, build_model, default_dtype
from atoll.models.model_config import DeltaShape, ModelConfig, MoEShape
from atoll.models.tokenizer import Tokenizer

# Qwen3.5-35B-A3B, text part. Source: Qwen's published sizes, as given in the launch script scripts/models/qwen3.5-35B-A3B.sh of THUDM/slime.
_QWEN3_5_35B_A3B = ModelConfig(
    model_type="qwen3_5_moe",
    num_layers=40,
    hidden_size=2048,
    intermediate_size=0,
    num_q_heads=16,
    num_kv_heads=2,
    head_dim=256,
    vocab_size=248320,
    max_position=262144,
    rope_theta=1e7,
    rms_eps=1e-6,
    tie_embeddings=False,
    eos_token_ids=(),
    rotary_dim=64,
    linear_layers=tuple(i for i in range(40) if (i + 1) % 4),
    delta=DeltaShape(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=128, conv_width=4),
    moe=MoEShape(num_experts=256, experts_per_token=8, expert_size=512, shared_expert_size=512, normalize_weights=True),
)

SHAPES: dict[str, ModelConfig] = {
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    # The same kinds of layers, small enough for a CPU and for a test; heads as narrow as the kernels take.
    "tiny": replace(
        _QWEN3_5_35B_A3B,
        num_layers=4,
        hidden_size=64,
        num_q_heads=4,
        head_dim=64,
        vocab_size=512,
        max_position=4096,
        rotary_dim=16,
        linear_layers=(0, 1, 2),
        delta=DeltaShape(num_k_heads=2, num_v_heads=4, k_head_dim=16, v_head_dim=16, conv_width=4),
        moe=MoEShape(num_experts=8, experts_per_token=2, expert_size=32, shared_expert_size=32, normalize_weights=True),
    ),
}

# In the names of a checkpoint it tells that all experts of a layer lie in one tensor.
_FUSED = ("experts.gate_up_proj",)


class RandomWeights:
    """A `WeightSource` that makes each tensor when it is read, on the device: 35 billion numbers take seconds there and an hour on a host.

    Matrices are normal with variance 1 / in, so that activations stay of order 1 and the router spreads tokens over all experts. Vectors (norm scales and
    decays) hold 0.5, with which no layer is idle and no state grows.
    """

    path = "random weights"

    def __init__(self, config: ModelConfig, device: torch.device, *, seed: int = 0) -> None:
        self._shapes = _model_class(config).tensor_shapes(config, _FUSED if config.moe else ())
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor.fill_(0.5) if len(shape) == 1 else tensor.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)

    def num_elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())


class NumberTokenizer(Tokenizer):
    """Text for a vocabulary that has none: token 17 is written ` 17`. A word that is no number of the vocabulary stands for one, always the same.

    So every generated token has text, as a real model's has, and a prompt may be any text.
    """

    def __init__(self, vocab_size: int) -> None:
        backend = Backend(WordLevel())
        backend.decoder = ByteLevel()
        super().__init__(backend, (), {}, None)
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self._word_id(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return b" %d" % token_id

    def _word_id(self, word: str) -> int:
        # A number of more digits than any vocabulary needs is a word.
        if word.isascii() and word.isdecimal() and len(word) < 10 and int(word) < self._vocab_size:
            return int(word)
        return zlib.crc32(word.encode()) % self._vocab_size


def load_random(name: str, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    """The model `random:SHAPE`, with a NumberTokenizer and without a chat template. Raises ModelError for an unknown shape, and for one that is too large."""
    config = random_config(name)
    dtype = dtype or default_dtype(device)
    weights = RandomWeights(config, device)
    num_bytes, limit = weights.num_elements() * dtype.itemsize, _memory_bytes(device)
    if num_bytes > limit:
        raise ModelError(
            f"model {name!r} has {num_bytes / 1e9:.1f} GB of weights, {device} has {limit / 1e9:.1f} GB for them; use {RANDOM}tiny, or another device"
        )
    return LoadedModel(make_model(config, weights, device, dtype), config, NumberTokenizer(config.vocab_size))


def random_config(name: str) -> ModelConfig:
    """Of `random:SHAPE`. Raises ModelError for an unknown shape."""
    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        raise ModelError(f"model {name[:100]!r} has an unknown shape; use one of {', '.join(RANDOM + known for known in SHAPES)}")
    return SHAPES[shape]


def _memory_bytes(device: torch.device) -> int:
    """Free on a GPU; of the whole machine on a CPU, where what is free cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_model(config: ModelConfig, weights: RandomWeights, device: torch.device, dtype: torch.dtype) -> Model | HybridModel:
    return build_model(_model_class(config), config, weights, device, dtype)


def _model_class(config: ModelConfig):  # type: ignore[no-untyped-def]
    module, _, attribute = MODELS[config.model_type].partition(":")
    return getattr(importlib.import_module(module), attribute)
