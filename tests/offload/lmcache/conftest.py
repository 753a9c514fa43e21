"""What the cases of the connector to LMCache share: LMCaches that are closed again."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.offload.lmcache.pool import Pools


@pytest.fixture
def pools(tmp_path: Path, device: torch.device) -> "Iterator[Pools]":
    # Not above: pytest reads this file where LMCache is not installed, too.
    from tests.offload.lmcache.pool import Pools

    made = Pools(tmp_path, device)
    yield made
    made.close()
