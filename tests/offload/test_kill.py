"""A process killed at any moment leaves whole blobs or none; `tools/offload_kill.py` does this a thousand times."""

import json
import subprocess
import sys
from pathlib import Path


def kill(num_kills: int, tiers: str, fault: str, folder: Path, seed: int = 0) -> tuple[int, dict]:
    """In a process of its own, which forks: nothing else may run in it."""
    options = {"kills": num_kills, "tiers": tiers, "fault": fault, "folder": folder, "seed": seed}
    command = [sys.executable, "-m", "tools.offload_kill", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_what_is_read_back_after_a_kill_is_what_was_stored(tmp_path: Path) -> None:
    code, counts = kill(6, "both", "none", tmp_path)
    assert code == 0 and counts["wrong"] == counts["died"] == 0
    assert counts["kills"] == 6 and counts["whole"] > 0


def test_records_before_bytes_are_found(tmp_path: Path) -> None:
    # On a busy machine a child may be killed before it has stored anything; so more than once.
    rounds = (kill(6, "both", "records-first", tmp_path, seed) for seed in range(10))
    assert any(code == 1 and counts["wrong"] > 0 for code, counts in rounds)
