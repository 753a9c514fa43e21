"""What all tests share: the gpu mark, the device fixture and hypothesis' profile.

Collecting never touches CUDA, and imports no torch: whether a GPU is here is read off the device files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

# The same examples in every run, so that a failure is the change's; `--hypothesis-seed` or another profile explores.
hypothesis.settings.register_profile("atoll", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("atoll")

# NVIDIA's and AMD's compute nodes, and the one under which Windows lends a GPU to Linux.
GPU_DEVICE_FILES = ("nvidia0", "nvidiactl", "kfd", "dxg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, and fail those that find no GPU")
    parser.addoption("--page-screenshot", type=Path, metavar="FILE", help="where the test of the page leaves its picture; docs/page.png is made so")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that take long come first (scripts/test keeps that order), so that no process has one of them left when the others are done.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("--gpu") or has_gpu_device_file(Path("/dev")):
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session: pytest.Session) -> None:
    check_cuda_untouched(sys.modules)


def check_cuda_untouched(modules: Mapping[str, Any]) -> None:
    """Collecting must leave CUDA alone: a CUDA context at import time costs seconds, and breaks tests that fork."""
    if "torch" in modules and modules["torch"].cuda.is_initialized():
        raise pytest.UsageError("collecting the tests initialized CUDA; move what touches the device from module level into a test or fixture")


def has_gpu_device_file(dev: Path) -> bool:
    return any((dev / name).exists() for name in GPU_DEVICE_FILES)


@pytest.fixture(autouse=True)
def _gpu_present(request: pytest.FixtureRequest) -> None:
    """A test that was asked to run on a GPU and finds none is a failure, not a skip."""
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail(f"this test needs a GPU, and torch {torch.__version__} finds none; install a GPU build of torch, or leave out --gpu")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU in a test marked gpu, else the CPU."""
    import torch

    return torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu")
