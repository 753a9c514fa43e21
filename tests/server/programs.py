"""Programs that other people wrote, run as their users run them: those of .venv-clients, which scripts/setup makes, and curl."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
CURL = shutil.which("curl")

needs_clients = [pytest.mark.clients, pytest.mark.skipif(not CLIENTS.is_dir(), reason="needs .venv-clients, which scripts/setup clients makes")]
needs_curl = [pytest.mark.skipif(CURL is None, reason="needs curl")]


def run_client(name: str, *arguments: str, home: Path, folder: Path = ROOT) -> str:
    """A program of .venv-clients in a folder, without the Hugging Face hub; what it keeps lies under `home`. Fails where the program does."""
    # guidellm starts ten processes, each of which imports torch.
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home), "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run([CLIENTS / name, *arguments], cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
