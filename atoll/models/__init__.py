"""Models: one file per Hugging Face model_type; weights, tokenizers and configs from safetensors folders and GGUF files."""

from typing import TYPE_CHECKING

from atoll.lazy import imported_on_use
from atoll.models.detokenizer import Detokenizer
from atoll.models.model_config import DeltaShape, ModelConfig, MoEShape, RopeScaling
from atoll.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from atoll.models.base import Attend, Delta, HybridModel, Model
    from atoll.models.loader import LoadedModel, default_dtype, load_model, resolve_model

__all__ = [
    "Attend",
    "Delta",
    "DeltaShape",
    "Detokenizer",
    "HybridModel",
    "LoadedModel",
    "MoEShape",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "default_dtype",
    "load_model",
    "resolve_model",
]

# Loaded on first use: the server's own process wants a tokenizer, and not torch, which takes most of its start.
__getattr__ = imported_on_use(
    __name__,
    {
        "Attend": "atoll.models.base",
        "Delta": "atoll.models.base",
        "HybridModel": "atoll.models.base",
        "LoadedModel": "atoll.models.loader",
        "Model": "atoll.models.base",
        "default_dtype": "atoll.models.loader",
        "load_model": "atoll.models.loader",
        "resolve_model": "atoll.models.loader",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
