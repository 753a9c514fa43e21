"""What model tests share: SmolLM2 loaded by us and, from the same file, by transformers; both once per session."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from atoll.models import LoadedModel, load_model, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def smollm2_oracle() -> Iterator[Any]:
    path = resolve_model("smollm2")
    bar = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    yield transformers.LlamaForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    if bar:
        transformers.utils.logging.enable_progress_bar()
