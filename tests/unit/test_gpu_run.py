"""`tools.gpu_run`: commands side by side, each with its file and its limit, and nothing timed after a failure."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.gpu_run import STAGES, Job, run_stages


def python(name: str, program: str, limit_s: float = 30.0) -> Job:
    return Job(name, ("-c", program), limit_s)


def test_commands_of_a_step_run_beside_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Each waits for the other's file.
    program = """
import pathlib, time
pathlib.Path('{out}/MINE').touch()
while not pathlib.Path('{out}/OTHER').exists():
    time.sleep(0.01)
print('first')
print('at {commit}')
"""
    jobs = tuple(python(name, program.replace("MINE", name).replace("OTHER", other)) for name, other in (("a", "b"), ("b", "a")))
    assert run_stages([[jobs]], tmp_path, "abc1234") == 0
    assert (tmp_path / "a.txt").read_text() == "first\nat abc1234\n"
    said = capfd.readouterr().out
    assert said.startswith("commit abc1234\na: exit code 0, ") and "\n  at abc1234\n" in said and "first" not in said


def test_the_first_stage_that_fails_is_the_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stages = [[(python("bad", "raise SystemExit(3)"),), (python("rest", "print('of the stage')"),)], [(python("timed", "print('not run')"),)]]
    assert run_stages(stages, tmp_path, "abc1234") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "rest.txt"]
    assert "bad: exit code 3" in capfd.readouterr().out


def test_a_command_over_its_limit_is_ended_with_its_children(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = "import time, pathlib\nwhile True:\n    pathlib.Path({path!r}).write_text(str(time.time()))\n    time.sleep(0.02)".format(
        path=str(tmp_path / "beat")
    )
    slow = Job("slow", ("-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"), 1.0)
    assert run_stages([[(slow,)]], tmp_path, "abc1234") == 1
    assert "slow: over its limit of 1 s" in capfd.readouterr().out
    last = (tmp_path / "beat").read_text()
    time.sleep(0.2)
    assert (tmp_path / "beat").read_text() == last


def test_every_command_names_tests_or_options_that_exist() -> None:
    for job in (job for stage in STAGES.values() for step in stage for job in step):
        if "pytest" in job.arguments:
            paths = [argument for argument in job.arguments if argument.startswith("tests/")]
            assert paths and all((Path(__file__).parents[2] / path).exists() for path in paths), job.name
        else:
            # --help after them: the options are read, in their order, and nothing is run.
            told = subprocess.run((sys.executable, *job.arguments, "--no-such-option"), capture_output=True, text=True, timeout=60)
            assert told.returncode == 2 and "No such option" in told.stderr and "--no-such-option" in told.stderr, (job.name, told.stderr)
