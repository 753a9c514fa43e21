"""What the cases of the connector to LMCache share: LMCaches that are closed again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.offload.lmcache.pool import Pools


@pytest.fixture
def pools(tmp_path: Path, device: torch.device) -> Iterator[Pools]:
    made = Pools(tmp_path, device)
    yield made
    made.close()
