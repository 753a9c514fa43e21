"""`bench ab`: two shell commands in alternating restarts; the difference of their means beside what one command differs by from restart to restart."""

import itertools
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll.errors import ConfigError
from atoll.eval.endpoint import http

STOP_TIMEOUT_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True)
class AbOptions:
    """What runs. Without `load` each command runs to its end; with it each is a server, started anew, on which `load` runs."""

    a: str
    b: str
    restarts: int = 5  # of each
    warmups: int = 1  # restarts of each that are not counted
    value: str | None = None  # key in the last JSON object that is printed; None: the seconds that the command takes
    load: str | None = None
    ready_url: str = "http://127.0.0.1:8000/health"
    ready_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.restarts < 2:
            raise ConfigError(f"restarts {self.restarts} is below 2; a restart's noise shows only between two of them")


@dataclass
class AbReport:
    """Values of both, in the order in which they came."""

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """Mean of B - mean of A."""
        return statistics.fmean(self.b) - statistics.fmean(self.a)

    @property
    def noise(self) -> float:
        """Standard deviation of one command's restarts, both commands pooled."""
        return float((statistics.variance(self.a) / 2 + statistics.variance(self.b) / 2) ** 0.5)

    @property
    def difference_stderr(self) -> float:
        return float((statistics.variance(self.a) / len(self.a) + statistics.variance(self.b) / len(self.b)) ** 0.5)

    @property
    def p(self) -> float:
        return permutation_p(self.a, self.b)


def run_ab(options: AbOptions, on_value: Callable[[str, float], None] = lambda name, value: None) -> AbReport:
    """A B B A A B B A ...: drift falls on both alike. Raises ConfigError for a command that fails or prints no value."""
    report = AbReport()
    for i_round in range(options.warmups + options.restarts):
        for name in "AB" if i_round % 2 == 0 else "BA":
            value = _measure(options, options.a if name == "A" else options.b)
            if i_round >= options.warmups:
                (report.a if name == "A" else report.b).append(value)
                on_value(name, value)
    return report


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all ways to deal the values to two commands that differ in their means at least so much."""
    values, size = [*a, *b], len(a)
    total = sum(values)
    seen = abs(sum(a) / len(a) - sum(b) / len(b))
    others = [sum(chosen) for chosen in itertools.combinations(values, size)]
    # A tie is one, whatever the order of its sum.
    tolerance = 1e-12 * sum(map(abs, values))
    return sum(abs(one / size - (total - one) / len(b)) >= seen - tolerance for one in others) / len(others)


def report_lines(report: AbReport, unit: str) -> list[str]:
    mean_a, mean_b = statistics.fmean(report.a), statistics.fmean(report.b)
    lines = [f"{name} {unit}: mean {mean:.6g}, restarts {' '.join(f'{value:.6g}' for value in values)}" for name, mean, values in _both(report)]
    share = f" ({report.difference / mean_a:+.2%})" if mean_a else ""
    noise = f" ({report.noise / abs((mean_a + mean_b) / 2):.2%})" if mean_a + mean_b else ""
    lines.append(f"B - A: {report.difference:+.6g}{share}, standard error {report.difference_stderr:.3g}")
    lines.append(f"from restart to restart: {report.noise:.6g}{noise}; p {report.p:.3g} that a deal by chance differs so much")
    return lines


def _both(report: AbReport) -> Iterator[tuple[str, float, list[float]]]:
    for name, values in (("A", report.a), ("B", report.b)):
        yield name, statistics.fmean(values), values


def _measure(options: AbOptions, command: str) -> float:
    if options.load is None:
        return _value(options, command)
    with _serving(command, options.ready_url, options.ready_timeout_s):
        return _value(options, options.load)


def _value(options: AbOptions, command: str) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise ConfigError(f"command {command!r} ended with {done.returncode}: {done.stderr.strip()[-500:]}; mend it")
    return seconds if options.value is None else printed_value(done.stdout, options.value, command)


def printed_value(printed: str, key: str, command: str) -> float:
    """The number under `key` in the last line that is a JSON object and has it."""
    for line in reversed(printed.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get(key), (int, float)) and not isinstance(found[key], bool):
            return float(found[key])
    raise ConfigError(f"command {command!r} printed no JSON line with a number under {key!r}; give it --json, or another --value")


@contextmanager
def _serving(command: str, ready_url: str, timeout_s: float) -> Iterator[None]:
    """A server in a process group of its own, which has ended before the next one begins."""
    if _answers(ready_url):
        raise ConfigError(f"ready url {ready_url!r} answers before the server was started; stop what runs there, or name the server's own with --ready-url")
    process = subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_ready(process, command, ready_url, timeout_s)
        yield
    finally:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], command: str, ready_url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _answers(ready_url):
        if process.poll() is not None:
            raise ConfigError(f"server {command!r} ended with {process.returncode} before {ready_url} answered; run it by hand to see why")
        if time.monotonic() > deadline:
            raise ConfigError(f"server {command!r} did not answer {ready_url} within {timeout_s:g} s; raise --ready-timeout-s, or mend --ready-url")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return bool(http.get(url, timeout=5.0, trust_env=False).status_code == 200)
    except http.HTTPError:
        return False


def _signal_group(process: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    try:
        os.killpg(process.pid, sent)
    except ProcessLookupError:
        # It has ended by itself.
        return
