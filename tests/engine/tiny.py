"""A random two-layer Llama, a byte tokenizer and an LLM around them: a whole engine that starts in milliseconds."""

import codecs
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from atoll import LLM
from atoll.models.llama import LlamaModel
from atoll.models.model_config import ModelConfig

EOS = 256
BOS = 257
VOCAB = 258

CONFIG = ModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_position=512,
    rope_theta=10000.0,
    rms_eps=1e-5,
    tie_embeddings=False,
    eos_token_ids=(EOS,),
)


class RandomWeights:
    """A checkpoint of seeded noise, scaled so that logits are far enough apart for greedy decoding to be stable."""

    path = "random"

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tensors: dict[str, torch.Tensor] = {}
        for name, shape in LlamaModel.tensor_shapes(config).items():
            tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * (2.0 / shape[1] ** 0.5)
            self._tensors[name] = tensor

    def names(self) -> Collection[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors[name].to(dtype)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token per byte, and two special ones that have no text."""

    eos_token_ids = (EOS,)

    def __init__(self, bos_token_id: int | None = BOS) -> None:
        self.bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], *, tools: list[dict[str, Any]] | None = None) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


@dataclass(frozen=True)
class TinyLoaded:
    """As atoll.models.LoadedModel."""

    model: Any
    config: ModelConfig
    tokenizer: Any


@cache
def tiny_model() -> LlamaModel:
    return LlamaModel(CONFIG, RandomWeights(CONFIG), torch.device("cpu"), torch.float32)


def make_llm(*, model: Any = None, tokenizer: Any = None, **options: Any) -> LLM:
    """fp32 keys and values unless told otherwise: an equality must not hang on a rounding that tips."""
    options = {"kv_format": "fp32", "max_num_seqs": 8, "max_model_len": 256, **options}
    return LLM.from_loaded(TinyLoaded(model or tiny_model(), CONFIG, tokenizer or ByteTokenizer()), **options)  # type: ignore[arg-type]


def check_nothing_is_held(llm: LLM) -> None:
    """No request is left, the books agree, and once the prefix cache is empty every page and slot is free."""
    engine = llm.engine
    assert not engine.has_work
    engine.check()
    engine.reset_prefix_cache()
    engine.pool.check(held=())
    if engine.slots is not None:
        engine.slots.check(held=())


def prompts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    """Random prompts of varied length, one token and the longest among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(2, longest, (max(0, count - 2),), generator=generator).tolist()][:count]
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
