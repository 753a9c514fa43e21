"""What an import brings in: `ops` stands alone, and the pure parts need no torch."""

import importlib
import subprocess
import sys

import pytest

from tests.tree.rules import NO_TORCH

# Run in a fresh interpreter: import the first argument; print which of the others came along.
REPORT = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*[m for m in sys.argv[2:] if m in sys.modules])"
ABOVE_OPS = ("atoll.config", "atoll.kv", "atoll.models", "atoll.engine", "atoll.probe", "atoll.bench", "atoll.cli", "transformers")


def brought_in(module: str, *candidates: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", REPORT, module, *candidates], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_ops_stand_alone() -> None:
    """And without torch.compile's modules, which double the time of an import and which nothing here uses."""
    assert brought_in("atoll.ops.attention", *ABOVE_OPS, "torch._dynamo") == []


# The server's own process has a tokenizer, and leaves the model to the engine's.
@pytest.mark.parametrize("module", [*NO_TORCH, "atoll", "atoll.cli", "atoll.server.serve", "atoll.server.engine_process"])
def test_pure_part_needs_no_torch(module: str) -> None:
    assert brought_in(module, "torch", "triton", "transformers") == []


@pytest.mark.parametrize("package", ["atoll", "atoll.kv", "atoll.models", "atoll.offload"])
def test_every_name_of_a_package_is_there_and_no_other(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_what_comes_along_is_seen() -> None:
    assert brought_in("atoll.kv.pool", "torch", "atoll.kv.ledger", "atoll.engine") == ["torch", "atoll.kv.ledger"]
