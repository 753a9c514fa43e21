"""Which kernels a step's time goes to, as torch's profiler sees them, those inside a CUDA graph too. Knows no model."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a step; on a CPU, one operator's."""

    name: str
    calls: float  # per step
    time_us: float  # per step
    share: float  # of the time of all kernels; gaps between them belong to none


def profile_kernels(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> list[KernelTime]:
    """Every kernel of `call`, longest first. Empty where the profiler sees none, as when the driver forbids it."""
    on_gpu = device.type == "cuda"
    # Without acc_events torch warns, of a profile without a schedule too, that events of earlier cycles are lost.
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as seen:
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found: list[tuple[str, int, float]] = []
    for event in seen.key_averages():
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == wanted and time_us > 0:
            found.append((event.key, event.count, time_us))
    total_us = sum(time_us for _, _, time_us in found)
    times = [KernelTime(name, count / repeats, time_us / repeats, time_us / total_us) for name, count, time_us in found]
    return sorted(times, key=lambda time: time.time_us, reverse=True)


def merge_variants(times: Iterable[KernelTime]) -> list[KernelTime]:
    """Kernels that differ in their template arguments alone as one, longest first."""
    merged: dict[str, KernelTime] = {}
    for time in times:
        name = short_name(time.name)
        before = merged.get(name, KernelTime(name, 0.0, 0.0, 0.0))
        merged[name] = replace(before, calls=before.calls + time.calls, time_us=before.time_us + time.time_us, share=before.share + time.share)
    return sorted(merged.values(), key=lambda time: time.time_us, reverse=True)


def short_name(kernel: str) -> str:
    """A C++ kernel's name without return type, template arguments and parameters; of a mangled one its outer names; any other name as it is."""
    if kernel.startswith("_ZN"):
        kernel = _outer_names(kernel) + (" (grouped)" if "GroupProblemShape" in kernel else "")
    name = kernel.removeprefix("void ")
    return re.split(r"[<(](?!grouped)", name.replace("(anonymous namespace)", "anonymous"), maxsplit=1)[0].strip() or kernel


def _outer_names(mangled: str) -> str:
    """The namespaces and the function of an Itanium-mangled name: each is written as its length and itself."""
    names, rest = [], mangled[3:]
    while digits := re.match(r"\d+", rest):
        end = digits.end() + int(digits[0])
        names.append(rest[digits.end() : end])
        rest = rest[end:]
    return "::".join(names)
