"""What the server counts and how long things take, in Prometheus' text format under the prefix `atoll:`; knows no HTTP."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from atoll.engine.engine import Engine
from atoll.engine.output import RequestOutput, StreamPiece

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")

_SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the pool's pages that are neither free nor kept only for a later prefix
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens

    @classmethod
    def of(cls, engine: Engine) -> "EngineStats":
        scheduler, prefix = engine.scheduler, engine.prefix_stats
        usage = 1 - scheduler.cache.num_available / scheduler.ledger.num_usable
        return cls(len(scheduler.running), len(scheduler.waiting), usage, engine.num_steps, engine.num_preemptions, prefix.num_queries, prefix.num_hits)


@dataclass
class Timing:
    """One sequence's way through the server; seconds of the monotonic clock."""

    arrived_s: float
    num_prompt_tokens: int
    begun_s: float | None = None  # its first step
    last_piece_s: float | None = None


class ServerMetrics:
    """Counters and histograms, written by the engine's thread; gauges from the engine's last `EngineStats`."""

    def __init__(self, model_name: str) -> None:
        self.engine = EngineStats()
        self.num_generated = 0  # tokens
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that began.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._time_to_first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _LONG_S)
        self._inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", _SHORT_S)
        self._e2e_latency = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _LONG_S)
        self._queue_time = self._histogram("request_queue_time_seconds", "From a request's arrival to its first step.", _LONG_S)
        success = Counter("atoll:request_success", "Requests that ended, by reason.", ("model_name", "finished_reason"), registry=self._registry)
        self._ended = {reason: success.labels(model_name, reason) for reason in FINISHED_REASONS}
        self._registry.register(_EngineCollector(self))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def note_begun(self, timing: Timing) -> None:
        assert timing.begun_s is not None
        self._queue_time.observe(timing.begun_s - timing.arrived_s)
        self._prompt_tokens.inc(timing.num_prompt_tokens)

    def note_piece(self, timing: Timing, piece: StreamPiece, now_s: float) -> None:
        if piece.token_ids:
            self._generation_tokens.inc(len(piece.token_ids))
            self.num_generated += len(piece.token_ids)
            if timing.last_piece_s is None:
                self._time_to_first_token.observe(now_s - timing.arrived_s)
            else:
                self._inter_token_latency.observe(now_s - timing.last_piece_s)
            timing.last_piece_s = now_s
        if piece.output is not None:
            self.note_end(timing, piece.output, now_s)

    def note_end(self, timing: Timing, output: RequestOutput, now_s: float) -> None:
        self._ended[output.finish_reason].inc()
        self._e2e_latency.observe(now_s - timing.arrived_s)

    def engine_metrics(self) -> Iterator[Metric]:
        now = self.engine
        gauges = (
            ("num_requests_running", "Requests in a step.", now.num_running),
            ("num_requests_waiting", "Requests that wait for their first step, or after a preemption for their next.", now.num_waiting),
            ("kv_cache_usage_perc", "Share of the pool's pages in use; 1 is all.", now.kv_cache_usage),
        )
        counters = (
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

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"atoll:{name}", text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"atoll:{name}", text, ("model_name",), registry=self._registry, buckets=buckets_s).labels(self._model_name)


class _EngineCollector:
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.engine_metrics()
