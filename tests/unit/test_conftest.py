"""The gpu mark: deselected where no GPU is, a failure where it was asked for, and never touched while collecting."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import check_cuda_untouched, has_gpu_device_file
from tests.tree.files import ROOT

GPU_TEST = (
    "import pytest\n\n@pytest.mark.gpu\ndef test_gpu(device):\n    assert device.type == 'cuda'\n\ndef test_cpu(device):\n    assert device.type == 'cpu'\n"
)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run GPU_TEST under this project's conftest, with every GPU hidden from torch."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(GPU_TEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=hidden, capture_output=True, text=True, check=False)


def test_gpu_asked_for_and_absent_is_a_failure(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "--gpu")
    assert result.returncode == 1
    assert "this test needs a GPU, and torch" in result.stdout
    assert "1 passed, 1 error" in result.stdout


def test_gpu_test_is_deselected_without_device_files(tmp_path: Path) -> None:
    result = run_pytest(tmp_path)
    expected = "1 passed, 1 error" if has_gpu_device_file(Path("/dev")) else "1 passed, 1 deselected"
    assert expected in result.stdout


@pytest.mark.parametrize(("name", "found"), [("nvidia0", True), ("kfd", True), ("null", False)])
def test_device_files(tmp_path: Path, name: str, found: bool) -> None:
    (tmp_path / name).touch()
    assert has_gpu_device_file(tmp_path) is found


@pytest.mark.parametrize("touched", [True, False])
def test_cuda_touched_while_collecting_is_found(touched: bool) -> None:
    modules = {"torch": SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: touched))}
    check_cuda_untouched({})
    if touched:
        with pytest.raises(pytest.UsageError, match="initialized CUDA"):
            check_cuda_untouched(modules)
    else:
        check_cuda_untouched(modules)
