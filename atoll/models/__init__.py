"""Models: one file per Hugging Face model_type; weights, tokenizers and configs from safetensors folders and GGUF files."""

from atoll.models.base import Attend, Model
from atoll.models.detokenizer import Detokenizer
from atoll.models.loader import LoadedModel, default_dtype, load_model, resolve_model
from atoll.models.model_config import ModelConfig, RopeScaling
from atoll.models.tokenizer import Tokenizer

__all__ = ["Attend", "Detokenizer", "LoadedModel", "Model", "ModelConfig", "RopeScaling", "Tokenizer", "default_dtype", "load_model", "resolve_model"]
