"""What model tests share: SmolLM2, once per session."""

import pytest
import torch

from atoll.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", device="cpu", dtype=torch.float32)
