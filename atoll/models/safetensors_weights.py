"""A folder's safetensors files, single or sharded, as one source of tensors; knows no model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from atoll.errors import ModelError
from atoll.models.json_file import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """A `WeightSource` over `model.safetensors`, or over the shards that the index names. Files stay mapped until this object goes."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for shard, indexed in _shards(folder).items():
            path = folder / shard
            try:
                # Opened for the life of this object: entering it as a context would close the map.
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}; it is missing, cut or damaged, fetch it again") from error
            held = set(file.keys())
            absent = sorted((indexed or held) - held)
            if absent:
                raise ModelError(f"{path} lacks tensor {absent[0]}, which {_INDEX} places there ({len(absent)} in all); fetch the folder again")
            self._files |= dict.fromkeys(held, file)

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """What the file holds the tensor in, as safetensors spells it: F8_E4M3, BF16, F32."""
        return str(self._files[name].get_slice(name).get_dtype())

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._files[name].get_tensor(name).to(dtype)
        except SafetensorError as error:
            raise ModelError(f"cannot read tensor {name} of {self.path}: {error}; fetch the folder again") from error


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors that the index places in it (None: no index)."""
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}; give a folder with safetensors weights, or a .gguf file")
        return {_SINGLE: None}
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{folder / _INDEX} has no 'weight_map' object; the file is damaged")
    shards: dict[str, set[str] | None] = {}
    for name, shard in weight_map.items():
        indexed = shards.setdefault(shard, set())
        assert indexed is not None
        indexed.add(name)
    return shards
