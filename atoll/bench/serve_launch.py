"""`bench serve --launch`: a server of its own and the engine without one, in turn, each in a fresh process, under the same load; and their ratio."""

import multiprocessing
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from atoll.bench.serve import ServeRun, run_serve
from atoll.bench.serve_data import find_vocabulary, make_data
from atoll.bench.serve_offline import OfflineOptions, run_offline
from atoll.errors import ConfigError
from atoll.eval.endpoint import find_endpoint

Side = Literal["server", "offline"]
STOP_S = 60.0


@dataclass(frozen=True)
class Round:
    """One run of one side."""

    side: Side
    number: int
    run: ServeRun


def run_both(options: OfflineOptions, num_rounds: int, on_round: Callable[[Round], None] = lambda one: None) -> list[Round]:
    """Both sides in each round, in fresh processes: one alone may fill a GPU. Raises ConfigError where the server does not start."""
    rounds = []
    for number in range(num_rounds):
        # The other one first in every second round.
        sides: tuple[Side, Side] = ("server", "offline") if number % 2 == 0 else ("offline", "server")
        for side in sides:
            rounds.append(Round(side, number, _run_server(options) if side == "server" else _run_engine(options)))
            on_round(rounds[-1])
    return rounds


def throughputs(rounds: list[Round], side: Side) -> list[float]:
    """Output tokens per second, of requests that ended well."""
    good = [(sum(outcome.output_tokens for outcome in one.run.outcomes if outcome.error is None), one.run.duration_s) for one in rounds if one.side == side]
    return [tokens / duration_s for tokens, duration_s in good]


def ratio(rounds: list[Round]) -> float | None:
    """The server's median throughput as a share of the engine's; None: nothing ended well."""
    server, offline = (statistics.median(throughputs(rounds, side)) for side in ("server", "offline"))
    return server / offline if offline else None


def ratio_lines(rounds: list[Round]) -> list[str]:
    lines = []
    for side in ("server", "offline"):
        values = throughputs(rounds, side)
        spread = (max(values) - min(values)) / statistics.median(values) if any(values) else float("nan")
        told = ", ".join(f"{value:.1f}" for value in values)
        lines.append(f"{side:<7} output tokens/s: median {statistics.median(values):.1f}, spread {spread:.1%} ({told})")
    found = ratio(rounds)
    return [*lines, f"server / offline: {found:.4f}" if found is not None else "server / offline: nothing ended well"]


def _run_engine(options: OfflineOptions) -> ServeRun:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(run_offline, options).result()


def _run_server(options: OfflineOptions) -> ServeRun:
    with launched_server(options.model, options.engine_options) as url:
        endpoint = find_endpoint(url)
        conversations = make_data(options.dataset, options.data, find_vocabulary(endpoint), chat=options.load.chat)
        return run_serve(replace(options.load, endpoint=endpoint), conversations)


@contextmanager
def launched_server(model: str, engine_options: dict[str, Any]) -> Iterator[str]:
    """The address of an `atoll serve` on a free port, which ends with the block; its log goes to stderr."""
    command = [sys.executable, "-m", "atoll", "serve", "--port", "0", "--model", model, *serve_arguments(engine_options)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield _address(process.stderr)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def serve_arguments(engine_options: dict[str, Any]) -> list[str]:
    """Options of `atoll serve` for fields of EngineConfig."""
    arguments = []
    for name, value in engine_options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _address(log: IO[str]) -> str:
    """Read on until the server tells it; what comes later goes to stderr."""
    told = []
    for line in log:
        if match := re.search(r"is served at (\S+)/v1", line):
            rest = (line for line in log if not line.startswith("try: "))  # the address is of a server that only this process asks
            threading.Thread(target=sys.stderr.writelines, args=(rest,), daemon=True).start()
            return match[1]
        told.append(line)
    raise ConfigError(f"the server did not start: {''.join(told).strip()[-500:] or 'it said nothing'}; mend the option or the model that it names")
