"""Models: one file per Hugging Face model_type; weights, tokenizers and configs from safetensors folders and GGUF files."""

from atoll.models.base import Attend, Delta, HybridModel, Model
from atoll.models.detokenizer import Detokenizer
from atoll.models.loader import LoadedModel, default_dtype, load_model, resolve_model
from atoll.models.model_config import DeltaShape, ModelConfig, MoEShape, RopeScaling
from atoll.models.tokenizer import Tokenizer

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
