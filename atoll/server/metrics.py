"""What the server counts and how long things take, in Prometheus' text format under the prefix `atoll:`; knows no HTTP."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atoll.engine.output import FinishReason, StreamPiece
from atoll.offload.base import ConnectorStats
from atoll.server.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

_SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


@dataclass
class Timing:
    """One sequence's way through the server; seconds of the monotonic clock."""

    arrived_s: float
    num_prompt_tokens: int
    begun_s: float | None = None  # its first step
    last_piece_s: float | None = None
    has_ended: bool = False


class Histogram:
    """Counts by bucket. Every token passes through one, and prometheus_client's own takes a lock and a search from the lowest bucket for each."""

    def __init__(self, name: str, text: str, bounds_s: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self._sum_s += value_s

    def family(self, model_name: str) -> HistogramMetricFamily:
        """As Prometheus has it: each bucket counts what is at most its bound."""
        bounds = [*(repr(bound) for bound in self._bounds_s), "+Inf"]
        family = HistogramMetricFamily(f"atoll:{self._name}", self._text, labels=("model_name",))
        family.add_metric((model_name,), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)
        return family


class ServerMetrics:
    """Counts and histograms, kept by the event loop alone; gauges from the engine's last `EngineStats`."""

    def __init__(self, model_name: str) -> None:
        self.engine = EngineStats()
        self.num_generated = 0  # tokens
        self._num_prompt_tokens = 0
        self._num_ended: dict[FinishReason, int] = dict.fromkeys(FINISHED_REASONS, 0)
        self._model_name = model_name
        self._time_to_first_token = Histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _LONG_S)
        self._inter_token_latency = Histogram("inter_token_latency_seconds", "Between two tokens of a request.", _SHORT_S)
        self._e2e_latency = Histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _LONG_S)
        self._queue_time = Histogram("request_queue_time_seconds", "From a request's arrival to its first step.", _LONG_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def note_begun(self, timing: Timing, at_s: float) -> None:
        timing.begun_s = at_s
        self._queue_time.observe(at_s - timing.arrived_s)
        self._num_prompt_tokens += timing.num_prompt_tokens

    def note_piece(self, timing: Timing, piece: StreamPiece, now_s: float) -> None:
        if piece.token_ids:
            self.num_generated += len(piece.token_ids)
            if timing.last_piece_s is None:
                self._time_to_first_token.observe(now_s - timing.arrived_s)
            else:
                self._inter_token_latency.observe(now_s - timing.last_piece_s)
            timing.last_piece_s = now_s
        if piece.output is not None:
            self.note_end(timing, piece.output.finish_reason, now_s)

    def note_end(self, timing: Timing, reason: FinishReason, now_s: float) -> None:
        timing.has_ended = True
        self._num_ended[reason] += 1
        self._e2e_latency.observe(now_s - timing.arrived_s)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client, at each scrape."""
        now = self.engine
        gauges = (
            ("num_requests_running", "Requests in a step.", now.num_running),
            ("num_requests_waiting", "Requests that wait for their first step, or after a preemption for their next.", now.num_waiting),
            ("kv_cache_usage_perc", "Share of the pool's pages in use; 1 is all.", now.kv_cache_usage),
        )
        counters = (
            ("prompt_tokens", "Tokens of prompts that began.", self._num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.num_generated),
            ("num_preemptions", "Requests that gave their pages back, to be computed again.", now.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens reused from it.", now.prefix_hits),
            ("engine_steps", "Steps of the engine.", now.num_steps),
        )
        family: GaugeMetricFamily | CounterMetricFamily
        for name, text, value in gauges:
            family = GaugeMetricFamily(f"atoll:{name}", text, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family
        for name, text, value in counters:
            family = CounterMetricFamily(f"atoll:{name}", text, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family
        family = CounterMetricFamily("atoll:request_success", "Requests that ended, by reason.", labels=("model_name", "finished_reason"))
        for reason, count in self._num_ended.items():
            family.add_metric((self._model_name, reason), count)
        yield family
        if now.offload is not None:
            yield from self._offload(now, now.offload)
        for histogram in (self._time_to_first_token, self._inter_token_latency, self._e2e_latency, self._queue_time):
            yield histogram.family(self._model_name)

    def _offload(self, now: EngineStats, offload: ConnectorStats) -> Iterator[Metric]:
        """Of an engine with tiers."""
        family: GaugeMetricFamily | CounterMetricFamily = GaugeMetricFamily(
            "atoll:num_requests_parked", "Requests that wait for their pages to be loaded.", labels=("model_name",)
        )
        family.add_metric((self._model_name,), now.num_parked)
        yield family
        counters = (
            ("queries", "Prompt tokens that the pool did not hold.", now.prefix_queries - now.prefix_hits + now.prefix_fetched),
            ("hits", "Of these, tokens that a load brought; prefix_cache_hits has them too.", now.prefix_fetched),
            ("loaded_bytes", "Bytes loaded into the pool.", offload.loaded_bytes),
            ("loaded_seconds", "Seconds that loads took, each from its start to its end.", offload.loaded_seconds),
            ("stored_bytes", "Bytes stored from the pool.", offload.stored_bytes),
            ("stored_seconds", "Seconds that stores took, each from its start to its end.", offload.stored_seconds),
            ("load_failures", "Loads of which a part did not arrive; it was computed instead.", offload.num_load_failures),
            ("store_failures", "Stores of which a part did not arrive.", offload.num_store_failures),
        )
        for name, text, count in counters:
            family = CounterMetricFamily(f"atoll:offload_{name}", text, labels=("model_name",))
            family.add_metric((self._model_name,), count)
            yield family
        of_tiers = (
            (GaugeMetricFamily, "used_bytes", "Bytes that a tier holds."),
            (GaugeMetricFamily, "capacity_bytes", "Bytes that a tier can hold."),
            (GaugeMetricFamily, "num_blobs", "Pages and states that a tier holds."),
            (GaugeMetricFamily, "is_suspect", "Whether a tier does not answer, so that what it alone holds is computed."),
            (CounterMetricFamily, "num_evicted", "Pages and states that a tier gave up for others."),
            (CounterMetricFamily, "num_failures", "Operations of a tier that failed."),
        )
        for kind, name, text in of_tiers:
            family = kind(f"atoll:offload_tier_{name.removeprefix('num_').removeprefix('is_')}", text, labels=("model_name", "tier"))
            for tier in offload.tiers:
                family.add_metric((self._model_name, tier.name), getattr(tier, name))
            yield family
