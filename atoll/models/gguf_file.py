"""A GGUF file: metadata and tensors, read by name and dequantized; knows no model.

The header is parsed here: the `gguf` package's reader takes 2.1 s for SmolLM2's (its 150,000 strings become one array each), this one 0.1 s, and it
can name the place where a file is cut. The package still owns the quantized formats.
Source: the GGUF specification, versions 2 and 3, little-endian.
"""

import importlib
import math
import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from atoll.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type -> struct code
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor's bytes lie."""

    shape: tuple[int, ...]  # elements, outermost first
    quant_type: int  # ggml's number
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """Metadata in memory, tensors mapped. Names are the file's own.

    Raises ModelError for a file that is missing, cut, of another format, or split over several files.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read {path}: {error}; give a readable GGUF file") from error
        header = _Cursor(self._bytes, self.path)
        if header.take(4) != _MAGIC:
            raise ModelError(f"{path} does not begin with {_MAGIC.decode()}; it is damaged or no GGUF file")
        version = header.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{path} has GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian, are supported")
        num_tensors, num_keys = header.scalar("Q"), header.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = header.string()
            self.metadata[key] = header.value(header.scalar("I"))
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{path} is one of {self.metadata['split.count']} parts; merge them into one file first (llama-gguf-split --merge)")
        self.tensors = self._read_tensor_table(header, num_tensors)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantized through fp32, on the CPU."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)
        quants = _gguf("quants")
        values = quants.dequantize(raw.reshape(*tensor.shape[:-1], -1), quants.GGMLQuantizationType(tensor.quant_type))
        return torch.from_numpy(values).to(dtype)

    def _read_tensor_table(self, header: "_Cursor", num_tensors: int) -> dict[str, GGUFTensor]:
        rows = []
        for _ in range(num_tensors):
            name = header.string()
            sizes = header.numbers("Q", header.scalar("I"))  # innermost first
            rows.append((name, tuple(reversed(sizes)), header.scalar("I"), header.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} gives general.alignment = {alignment!r}; it must be a positive number of bytes, the file is damaged")
        data_start = -(-header.position // alignment) * alignment
        tensors = {}
        for name, shape, quant_type, offset in rows:
            num_bytes = self._num_bytes(name, shape, quant_type)
            end = data_start + offset + num_bytes
            if end > len(self._bytes):
                raise ModelError(f"{self.path} is cut: tensor {name} ends at byte {end}, the file has {len(self._bytes)}; fetch it again")
            tensors[name] = GGUFTensor(shape, quant_type, data_start + offset, num_bytes)
        return tensors

    def _num_bytes(self, name: str, shape: tuple[int, ...], quant_type: int) -> int:
        sizes = _gguf("constants").GGML_QUANT_SIZES
        if quant_type not in sizes:
            raise ModelError(f"{self.path}: tensor {name} has quantization type {quant_type}, unknown to the gguf package; pip install -U gguf")
        block, block_bytes = sizes[quant_type]  # elements, bytes
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name} has rows of {shape[-1:]} elements, its format packs {block} at a time; the file is damaged")
        return math.prod(shape) // block * block_bytes


class _Cursor:
    """Reads forward through the header; every step that would leave the file is a ModelError."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if start + num_bytes > len(self._data):
            raise ModelError(f"{self._path} is cut: the header goes on to byte {start + num_bytes}, the file has {len(self._data)}; fetch it again")
        self.position = start + num_bytes
        return self._data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def numbers(self, code: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(count * struct.calcsize("<" + code)), np.dtype(code).newbyteorder("<")).tolist()

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: a string before byte {self.position} is not UTF-8 ({error.reason}); the file is damaged") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                return self.numbers(_SCALARS[item], count)
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: value type {kind} at byte {self.position} is unknown; the file is damaged or of a newer version")
        return self.scalar(_SCALARS[kind])


def _gguf(module: str) -> ModuleType:
    """Imported late, since a machine that reads only safetensors may lack the package."""
    try:
        return importlib.import_module(f"gguf.{module}")
    except ImportError as error:
        raise ModelError(f"GGUF files need the package gguf ({error}); pip install gguf") from error
