"""Figures of a run of `bench serve`, under the JSON keys of `vllm bench serve`, and as text. Knows no server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.bench.serve import ServeRun
from atoll.bench.serve_client import Outcome
from atoll.errors import ConfigError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, the first excluded",
    "itl": "time between pieces",
    "e2el": "time to the last token",
}
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def samples_ms(outcomes: Sequence[Outcome], metric: str) -> list[float]:
    """Of requests that ended well. A request without a second token has no tpot."""
    if metric == "itl":
        return [1e3 * itl for outcome in outcomes for itl in outcome.itls_s]
    return [1e3 * value for outcome in outcomes if (value := getattr(outcome, f"{metric}_s")) is not None]


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from `ttft:200`, several in one text or in many. Raises ConfigError for anything else."""
    limits: dict[str, float] = {}
    for part in " ".join(given).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in _GOODPUT_METRICS or not limits[name] > 0:
            raise ConfigError(f"goodput {part!r} is not a limit in milliseconds; write for example ttft:200 tpot:50, of {', '.join(_GOODPUT_METRICS)}")
    return limits


def is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Within all limits; what a request does not have keeps every limit."""
    values = {name: getattr(outcome, f"{name}_s") for name in limits}
    return all(value is None or 1e3 * value <= limits[name] for name, value in values.items())


def parse_names(option: str, given: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in given.split(",") if part.strip())
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"{option} {name!r} is unknown; use some of {','.join(METRICS)}")
    return names


def parse_percentiles(given: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(float(part) for part in given.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ConfigError(f"--metric-percentiles {given!r} is not a list of numbers from 0 to 100; write for example 50,99")
    return percentiles


def figures(
    run: ServeRun, *, metrics: Sequence[str] = tuple(METRICS), percentiles: Sequence[float] = (99.0,), goodput: dict[str, float] | None = None
) -> dict[str, Any]:
    """Throughputs count what ended well. Standard deviations are of the population, percentiles interpolate linearly; None where there is no sample."""
    good = [outcome for outcome in run.outcomes if outcome.error is None and not outcome.left]
    inputs, outputs = sum(outcome.prompt_tokens or 0 for outcome in good), sum(outcome.output_tokens for outcome in good)
    cached = [outcome.cached_tokens for outcome in good]
    found: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": sum(outcome.error is not None for outcome in run.outcomes),
        "left": sum(outcome.error is None and outcome.left for outcome in run.outcomes),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": None if None in cached else sum(cached),
        "request_throughput": len(good) / run.duration_s,
        "request_goodput": sum(is_good(outcome, goodput) for outcome in good) / run.duration_s if goodput else None,
        "output_throughput": outputs / run.duration_s,
        "total_token_throughput": (inputs + outputs) / run.duration_s,
        "max_concurrent_requests": max_concurrent(run.outcomes),
    }
    for metric in metrics:
        found |= _spread(metric, samples_ms(good, metric), percentiles)
    return found


def errors_of(run: ServeRun) -> list[str]:
    """Of the requests that failed."""
    return [outcome.error for outcome in run.outcomes if outcome.error is not None]


def max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at once."""
    changes = sorted([(outcome.start_s, 1) for outcome in outcomes] + [(outcome.end_s, -1) for outcome in outcomes])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _spread(metric: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        f"mean_{metric}_ms": float(np.mean(values)) if values else None,
        f"median_{metric}_ms": float(np.median(values)) if values else None,
        f"std_{metric}_ms": float(np.std(values)) if values else None,
    }
    return found | {f"p{percentile:g}_{metric}_ms": float(np.percentile(values, percentile)) if values else None for percentile in percentiles}


def details(run: ServeRun) -> dict[str, Any]:
    """Each request's own, in the order in which they ended; seconds, as in `vllm bench serve --save-detailed`."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in run.outcomes],
        "output_lens": [outcome.output_tokens for outcome in run.outcomes],
        "ttfts": [outcome.ttft_s for outcome in run.outcomes],
        "itls": [outcome.itls_s for outcome in run.outcomes],
        "generated_texts": [outcome.text for outcome in run.outcomes],
        "errors": [outcome.error or "" for outcome in run.outcomes],
    }


def report_lines(found: dict[str, Any]) -> list[str]:
    cached = "" if found["total_cached_tokens"] is None else f" ({found['total_cached_tokens']} from the prefix cache)"
    left = f", {found['left']} left by their clients" if found["left"] else ""
    lines = [
        f"{found['completed']} requests completed, {found['failed']} failed{left}, in {found['duration']:.2f} s; "
        f"at most {found['max_concurrent_requests']} at once",
        f"input tokens {found['total_input_tokens']}{cached}, output tokens {found['total_output_tokens']}",
        f"requests/s {found['request_throughput']:.2f}, output tokens/s {found['output_throughput']:.2f}, all tokens/s {found['total_token_throughput']:.2f}",
    ]
    if found["request_goodput"] is not None:
        lines.append(f"goodput: {found['request_goodput']:.2f} requests/s within all limits")
    for metric, meaning in METRICS.items():
        told = [f"{key.partition('_')[0]} {value:.2f}" for key, value in found.items() if key.endswith(f"_{metric}_ms") and value is not None]
        if told:
            lines.append(f"{metric:<5} ms: {', '.join(told)}   ({meaning})")
    return lines
