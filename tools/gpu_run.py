"""Runs what only a machine with a GPU can, stage by stage, and prints a line for each command; `python -m tools.gpu_run STAGE...`.

Kernels are tested before anything is timed on them: the first stage in which a command fails is the last one. The commands of a step run beside each other, a
step that is timed has the machine to itself. Each command's output goes to a file of its name in `--out`, rows of benchmarks beside it.
"""

import argparse
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PYTEST = ("-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider")
ATOLL = ("-m", "atoll")
REPLAY = (
    "eval replay --chat --num-fewshot 1 --own-shots --limit 440 --segment 440 --max-tokens 16 --concurrency 1 "
    "--device cuda --max-num-seqs 64 --max-model-len 640 --guard on --offload host:2GiB --ordering-control"
)
# In pages: few enough that the second pass is fetched.
REPLAY_NUM_PAGES = {"bf16": 2400, "fp8_tensor": 3200, "fp8_token": 3200}
DECODE = "bench decode --shapes full --l2 both --backend gluon_sm90 --backend flashinfer_xqa --run full --budget-s 400"
MODEL = (
    "bench model --attention-backend triton --attention-backend gluon_sm90 --batch 1,16,64,256 --context 1024,16384 --kv-format bf16,fp8_tensor --replays 20"
)
LMCACHE_TESTS = tuple(f"tests/offload/lmcache/cases_{name}.py" for name in ("gpu", "blobs", "disk"))


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of Python's; `{out}` and `{commit}` in it are filled in."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    num_last_lines: int = 1  # of its output, that are printed


def tests(name: str, limit_s: float, *arguments: str) -> Job:
    return Job(name, (*PYTEST, "-m", "gpu", *arguments), limit_s)


def atoll(name: str, limit_s: float, line: str, num_last_lines: int) -> Job:
    return Job(name, (*ATOLL, *shlex.split(line)), limit_s, num_last_lines)


Step = tuple[Job, ...]
STAGES: dict[str, tuple[Step, ...]] = {
    "kernels": (
        (tests("mutation", 90, "tests/ops/test_mutation.py"), tests("gluon", 120, "-n", "3", "tests/ops/test_gluon_sm90.py", "tests/unit/test_bench_run.py")),
    ),
    "ownership": ((tests("ownership", 300, "tests/ops/test_ownership.py"),),),
    "probe": (
        (atoll("probe-gluon", 150, "probe kernels --backend gluon_sm90 --matrix full --jobs 16", 3),),
        (atoll("probe-triton", 150, "probe kernels --backend triton --matrix full --jobs 16", 3),),
        tuple(atoll(f"probe-engine-{kv_format}", 60, f"probe engine --kv-format {kv_format}", 2) for kv_format in ("bf16", "fp8_tensor")),
    ),
    "offload": (
        (atoll("bench-offload", 130, "bench offload --rounds 3 --commit {commit} --out {out}/offload.jsonl", 24),),
        (
            *(atoll(f"replay-{kv_format}", 150, f"{REPLAY} --kv-format {kv_format} --num-pages {pages}", 5) for kv_format, pages in REPLAY_NUM_PAGES.items()),
            tests("offload-tests", 60, "tests/offload/test_gpu.py"),
            tests("offload-engine-tests", 90, "-n", "3", "tests/offload/test_gpu_engine.py"),
        ),
        # These have no mark: pytest collects them in LMCache's environment alone.
        (Job("lmcache-tests", (*PYTEST, *LMCACHE_TESTS), 60),),
    ),
    "engine": ((tests("engine-tests", 200, "-n", "10", "--dist", "loadfile", "tests/engine"),),),
    "decode": ((atoll("bench-decode", 430, DECODE + " --commit {commit} --out {out}/decode.jsonl", 14),),),
    "model": ((atoll("bench-model", 130, MODEL + " --commit {commit} --out {out}/model.jsonl", 20),),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"in this order; {', '.join(STAGES)}; all of them where none is named")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-run"), help="the folder for outputs and rows")
    parser.add_argument("--commit", help="to be written into the rows; that of the checkout where it is left out")
    args = parser.parse_args()
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"stage {unknown[0]!r} is unknown; choose from {', '.join(STAGES)}")
    commit = args.commit or subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=True).stdout.strip()
    sys.exit(run_stages([STAGES[stage] for stage in args.stages or STAGES], args.out, commit))


def run_stages(stages: Sequence[Sequence[Step]], out: Path, commit: str) -> int:
    """1 once a stage has failed, whose remaining steps still run; 0 where none has."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"commit {commit}")
    for stage in stages:
        num_good = sum(run_step(step, out, commit) for step in stage)
        if num_good < len(stage):
            print("stopped: what comes next would be told of code that fails")
            return 1
    return 0


def run_step(step: Step, out: Path, commit: str) -> bool:
    """Whether all of its commands have ended with 0; one that is over its limit is ended with all that it has started."""
    begin_s = time.monotonic()
    running = [(job, *start(job, out, commit)) for job in step]
    are_good = True
    try:
        for job, process, path in running:
            try:
                process.wait(max(begin_s + job.limit_s - time.monotonic(), 0.0))
                ending = f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                ending = f"over its limit of {job.limit_s:g} s"
            are_good &= process.returncode == 0
            end(process)
            print(
                f"{job.name}: {ending}, {time.monotonic() - begin_s:.0f} s",
                *path.read_text(errors="replace").splitlines()[-job.num_last_lines :],
                sep="\n  ",
                flush=True,
            )
    finally:
        for _, process, _ in running:
            end(process)
    return are_good


def start(job: Job, out: Path, commit: str) -> tuple[subprocess.Popen[bytes], Path]:
    path = out / f"{job.name}.txt"
    command = (sys.executable, *(argument.format(out=out, commit=commit) for argument in job.arguments))
    with path.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True), path


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
