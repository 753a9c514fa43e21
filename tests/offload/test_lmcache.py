"""The connector to LMCache: its tests are the cases of the folder lmcache, which run where LMCache is; here is who starts them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.errors import ConfigError
from atoll.offload.lmcache import make_lmcache

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "lmcache"
IS_HERE = importlib.util.find_spec("lmcache") is not None
PYTHON = Path(sys.executable) if IS_HERE else ROOT / ".venv-lmcache" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.lmcache
@pytest.mark.skipif(not PYTHON.is_file(), reason="needs .venv-lmcache, which scripts/setup lmcache makes")
def test_cases_hold_where_lmcache_is(pytestconfig: pytest.Config) -> None:
    """In a process of its own: LMCache adds to the logs, metrics and threads of the process that it is in."""
    flags = ["--gpu"] if pytestconfig.getoption("--gpu") else []
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, *sorted(CASES.glob("cases_*.py"))]
    settings = {"PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


def test_without_lmcache_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is None here cannot be imported, wherever LMCache is.
    monkeypatch.setitem(sys.modules, "lmcache", None)
    monkeypatch.delitem(sys.modules, "atoll.offload.lmcache_store", raising=False)
    with pytest.raises(ConfigError, match=r"install atoll\[lmcache\]"):
        make_lmcache(None, "tests", torch.device("cpu"))
