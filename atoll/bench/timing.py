"""Times of device work: CUDA-graph replay, variants interleaved in one run, medians and spreads. Knows no attention.

Many calls go into one graph, since a decode call is shorter than its launch. Before each sample the same graph runs once untimed: the device is then
busy while the host queues the timed replays, so that no launch gap is counted, and the caches hold what this variant left there.
The order of variants rotates from round to round, so that drift (clocks, heat) falls on all alike.
Calls that upload from the host fit into no graph; `time_eager` and `time_queued` time them as they are.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

GRAPH_CALLS = 20
ROUNDS = 7
# A sample this long has under 0.1 % of the event timer's resolution (0.5 us) in it.
MIN_SAMPLE_US = 1000.0
# Long calls need no 20 in a graph to hide a launch; this bounds the time of a run.
MAX_GRAPH_US = 8000.0


# The device is held for this many times what the host needs to queue a sample's calls; where that was too short, for twice as long, up to the longest.
# Short ones are forgiven that often: a call may wait for the device once, to allocate a pinned buffer that it keeps.
HOLD_MULTIPLE, LONGEST_HOLD_MULTIPLE = 2.0, 16.0
MAX_SHORT_HOLDS = 8
_HOLD_CYCLES_PER_US = 2000  # a device whose clock is slower than 2 GHz is held longer


@dataclass(frozen=True)
class Timing:
    """One variant's time per call."""

    median_us: float
    spread: float  # (longest - shortest) / median over the rounds


@dataclass(frozen=True)
class EagerTiming:
    """Times per call of calls that the host makes one after another, as a program without graphs does."""

    wall: Timing  # the device waited for after the last
    host_us: float  # until a call returns; median


def time_interleaved(variants: Mapping[str, Sequence[Call]], device: torch.device, *, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time per call of each variant. A variant is a list of calls that run one after another; all are timed as one and divided by their number."""
    samples = _graph_samples(variants, rounds) if device.type == "cuda" else _host_samples(variants, rounds)
    return {name: _timing(values) for name, values in samples.items()}


def time_eager(calls: Sequence[Call], device: torch.device, *, rounds: int = ROUNDS) -> EagerTiming:
    """Each call once in every round, the device idle before and waited for after. The caller has warmed them up."""
    walls_us, hosts_us = [], []
    for _ in range(rounds):
        _synchronize(device)
        begin = time.perf_counter()
        for call in calls:
            call()
        queued = time.perf_counter()
        _synchronize(device)
        walls_us.append((time.perf_counter() - begin) * 1e6 / len(calls))
        hosts_us.append((queued - begin) * 1e6 / len(calls))
    return EagerTiming(_timing(walls_us), statistics.median(hosts_us))


def time_queued(calls: Sequence[Call], device: torch.device, host_us: float, *, rounds: int = ROUNDS) -> Timing | None:
    """Time per call on the device's clock, for calls that no graph can hold, as those that upload from the host; `host_us` is what one takes to return.

    The device is held busy until all calls are queued, so that no launch gap is counted; a sample in which it was not is thrown away and the hold
    doubled. None on a CPU, and where the device could not be held long enough, as when a call waits for it.
    """
    if device.type != "cuda":
        return None
    multiple, num_short = HOLD_MULTIPLE, 0
    samples_us: list[float] = []
    while len(samples_us) < rounds:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(multiple * host_us * len(calls) * _HOLD_CYCLES_PER_US))
        begin.record()
        for call in calls:
            call()
        end.record()
        was_held = not begin.query()
        torch.cuda.synchronize(device)
        if was_held:
            samples_us.append(begin.elapsed_time(end) * 1e3 / len(calls))
            continue
        num_short += 1
        multiple = min(2 * multiple, LONGEST_HOLD_MULTIPLE)
        if num_short > MAX_SHORT_HOLDS:
            return None
    return _timing(samples_us)


def repeat_calls(calls: Sequence[Call], call_us: float) -> list[Call]:
    """As many calls as one graph should hold: a multiple of those given, so that consecutive replays go on in the same cycle."""
    wanted = min(GRAPH_CALLS, max(2, math.ceil(MAX_GRAPH_US / max(call_us, 1e-3))))
    return list(calls) * math.ceil(wanted / len(calls))


def check_capture(call: Call, device: torch.device) -> None:
    """Capture a call that has run before, and drop it: one that waits for the device raises here, not in the run that times it beside others."""
    if device.type == "cuda":
        # A capture that fails leaves its own stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            _capture([call])


def estimate_us(call: Call, device: torch.device, *, repeats: int = 3) -> float:
    """A rough time of one call after one that warms it up, launch gaps included."""
    call()
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e6 / repeats


def measure_read_gbps(device: torch.device, num_bytes: int = 4 << 30) -> float | None:
    """Best rate (10^9 bytes/s) at which a plain reduction reads memory far larger than every cache; None on a CPU."""
    if device.type != "cuda":
        return None
    # Random: constant data can be read faster than real data.
    data = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).uniform_()
    variants: dict[str, list[Call]] = {"sum": [data.sum] * 2, "amax": [data.amax] * 2}
    timings = time_interleaved(variants, device)
    return num_bytes / min(t.median_us for t in timings.values()) / 1e3


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache, 0 on a CPU (whose caches are not told apart)."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _graph_samples(variants: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, list[float]]:
    graphs = {name: _capture(calls) for name, calls in variants.items()}
    replays = {name: _num_replays(graph) for name, graph in graphs.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    names = list(graphs)
    for i_round in range(rounds):
        shift = i_round % len(names)
        for name in names[shift:] + names[:shift]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[name].replay()
            begin.record()
            for _ in range(replays[name]):
                graphs[name].replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    per_us = {name: 1e3 / (replays[name] * len(variants[name])) for name in names}
    return {name: [begin.elapsed_time(end) * per_us[name] for begin, end in pairs] for name, pairs in events.items()}


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compilation and library handles stay out of the graph.
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _num_replays(graph: torch.cuda.CUDAGraph) -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return max(1, min(50, math.ceil(MIN_SAMPLE_US / max(begin.elapsed_time(end) * 1e3, 1.0))))


def _host_samples(variants: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for name in names:
        variants[name][0]()
    for i_round in range(rounds):
        shift = i_round % len(names)
        for name in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            for call in variants[name]:
                call()
            samples[name].append((time.perf_counter() - begin) * 1e6 / len(variants[name]))
    return samples


def _timing(samples_us: list[float]) -> Timing:
    median = statistics.median(samples_us)
    return Timing(median, (max(samples_us) - min(samples_us)) / median)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
