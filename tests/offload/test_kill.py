"""A process killed at any moment leaves whole blobs or none; `tools/offload_kill.py` does this a thousand times."""

import json
import subprocess
import sys
from pathlib import Path


def kill(num_kills: int, tiers: str, fault: str, folder: Path) -> tuple[int, dict]:
    """In a process of its own, which forks: nothing else may run in it."""
    command = [sys.executable, "-m", "tools.offload_kill", f"--kills={num_kills}", f"--tiers={tiers}", f"--fault={fault}", f"--folder={folder}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_what_is_read_back_after_a_kill_is_what_was_stored(tmp_path: Path) -> None:
    code, counts = kill(6, "both", "none", tmp_path)
    assert code == 0 and counts["wrong"] == counts["died"] == 0
    assert counts["kills"] == 6 and counts["whole"] > 0


def test_records_before_bytes_are_found(tmp_path: Path) -> None:
    code, counts = kill(6, "both", "records-first", tmp_path)
    assert code == 1 and counts["wrong"] > 0
