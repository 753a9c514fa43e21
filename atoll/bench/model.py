"""`bench model`: decode steps of a model of a given shape, random weights and pools already full, through the engine's own runner.

Several attention backends take turns step by step over the same weights, pages and states, so that drift falls on all alike.
"""

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from atoll.bench.kernel_times import KernelTime, merge_variants, profile_kernels
from atoll.engine.build import make_slot_layout
from atoll.engine.runner import Runner, RunnerConfig
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask, Step, StepRow
from atoll.errors import ConfigError, PoolError
from atoll.kv.layout import PageLayout
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool
from atoll.models import HybridModel, Model, ModelConfig, default_dtype
from atoll.models.random_model import SHAPES, RandomWeights, make_model
from atoll.ops.attention import DecodeSpec, backend_masks_unowned, choose_backend
from atoll.ops.quant.formats import KVFormat

# Beside weights, pages and slots, for each runner: workspaces, activations, the CUDA context; and per sequence three copies of its logits in fp32.
SPARE_BYTES = 3 << 30
LOGIT_COPIES = 3
_FILL_PAGES = 256  # fp8 pages are filled through fp32 copies, this many pages at a time
_TABLE_KERNELS = 12  # kernels of a profile that are listed by name


@dataclass(frozen=True)
class ModelBenchOptions:
    """What to measure: every KV format at every context and batch, with every backend."""

    shape: str = "qwen3.5-35b-a3b"
    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (1024,)  # tokens of each sequence, the new one included
    kv_formats: tuple[str, ...] = ("bf16",)
    page_size: int = 16  # tokens
    replays: int = 30  # measured steps of each backend; the median counts
    profile: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None  # None: the model loader's choice for the device
    attention_backends: tuple[str, ...] = ("auto",)
    seed: int = 0


@dataclass
class ModelRow:
    """One batch at one context with one backend."""

    shape: str
    batch: int
    context: int  # tokens
    kv_format: str
    page_size: int  # tokens
    dtype: str
    attention_backend: str | None = None  # that ran; where none did, that was asked for
    graph: bool | None = None  # whether the steps replayed a CUDA graph
    replays: int = 0
    step_us: float | None = None  # a whole step of the runner, batch building and sampling included
    spread: float | None = None  # (longest - shortest) / step_us
    device_us: float | None = None  # the graph alone, on the device's clock; None without a graph
    kernels: list[KernelTime] | None = None  # None: not profiled
    note: str | None = None  # why a time is missing
    speedup: float | None = None  # tokens/s over those of the case's first backend; None for the first

    @property
    def tokens_per_s(self) -> float | None:
        return self.batch / self.step_us * 1e6 if self.step_us else None


def run_model(options: ModelBenchOptions, on_row: Callable[[ModelRow], None] = lambda row: None) -> list[ModelRow]:
    """Measure every case that fits in memory beside the weights; the others become rows with a note.

    Each sequence has its own random token, keys, values and states, so that tokens go to different experts. The same step runs again and again: it rewrites
    its last row of keys and values, and its states move on.

    Raises ConfigError for a shape that is unknown or does not fit, a batch or context out of range, BackendError for a backend that refuses the shape.
    """
    config = _check(options)
    dtype = options.dtype or default_dtype(options.device)
    weights = RandomWeights(config, options.device, seed=options.seed)
    _check_fits(options, weights.num_elements() * dtype.itemsize)
    model = make_model(config, weights, options.device, dtype)
    all_rows = []
    for kv_format, context, batch in itertools.product(options.kv_formats, options.contexts, options.batches):
        name, layout = str(dtype).removeprefix("torch."), _page_layout(config, options, kv_format)
        rows = [ModelRow(options.shape, batch, context, kv_format, options.page_size, name, backend) for backend in options.attention_backends]
        give_back(options.device)
        needed = _case_bytes(config, layout, batch, context, dtype, len(options.attention_backends))
        free = _free_bytes(options.device)
        note = f"needs {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} are free" if free is not None and needed > free else None
        if note is None:
            try:
                _measure(rows, model, config, layout, options)
            except (PoolError, torch.OutOfMemoryError) as error:
                note = f"ran out of memory: {str(error).splitlines()[0]}"
        for row in rows:
            row.note = note
            on_row(row)
        all_rows += rows
    return all_rows


def row_lines(row: ModelRow) -> list[str]:
    """The case's time and rate, then the kernels it went to."""
    head = f"{row.shape} {row.kv_format} batch {row.batch:>3} context {row.context:>6}, {row.attention_backend}"
    if row.step_us is None or row.tokens_per_s is None:
        return [f"{head}: {row.note}"]
    device = f", on the device {row.device_us:.0f} us" if row.device_us is not None else ""
    speedup = f", {row.speedup:.3f} times the first" if row.speedup is not None else ""
    lines = [f"{head}: {row.step_us:9.0f} us a step{device}, {row.tokens_per_s:9.1f} tokens/s{speedup}"]
    if row.kernels is not None:
        merged = merge_variants(row.kernels)
        lines += [f"  {time.share:6.1%} {time.time_us:9.1f} us {time.calls:7.1f} calls  {time.name}" for time in merged[:_TABLE_KERNELS]]
        rest = merged[_TABLE_KERNELS:]
        lines.append(f"  {sum(time.share for time in rest):6.1%} {sum(time.time_us for time in rest):9.1f} us in {len(rest)} others")
    return lines


def _check(options: ModelBenchOptions) -> ModelConfig:
    config = SHAPES.get(options.shape)
    if config is None:
        raise ConfigError(f"shape {options.shape!r} is unknown; use one of {', '.join(SHAPES)}")
    for context in options.contexts:
        if not 2 <= context <= config.max_position:
            raise ConfigError(f"context {context} is outside 2 to {config.max_position}, the positions of {options.shape}; give tokens in that range")
    if options.replays < 1:
        raise ConfigError(f"replays {options.replays} is below 1; give 1 or more")
    # Before weights of 70 GB are made.
    dtype = options.dtype or default_dtype(options.device)
    for kv_format, backend in itertools.product(options.kv_formats, options.attention_backends):
        choose_backend(_spec(config, _page_layout(config, options, kv_format), dtype, backend), options.device, backend)
    return config


def _check_fits(options: ModelBenchOptions, num_bytes: int) -> None:
    free = _free_bytes(options.device)
    if free is not None and num_bytes > free:
        raise ConfigError(f"{options.shape} has {num_bytes / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB are free on {options.device}; use the shape 'tiny'")


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is left on a GPU; None on a CPU, where the system pages out and nothing certain can be said."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _case_bytes(config: ModelConfig, layout: PageLayout, batch: int, context: int, dtype: torch.dtype, num_runners: int) -> int:
    slot_layout = make_slot_layout(config, dtype)
    page_bytes = (1 + batch * layout.num_pages_for(context)) * layout.page_bytes
    slot_bytes = batch * slot_layout.slot_bytes if slot_layout is not None else 0
    logit_bytes = batch * config.vocab_size * torch.float32.itemsize * LOGIT_COPIES
    return page_bytes + slot_bytes + num_runners * (logit_bytes + SPARE_BYTES)


def _page_layout(config: ModelConfig, options: ModelBenchOptions, kv_format: str) -> PageLayout:
    return PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, options.page_size, cast(KVFormat, kv_format))


def _spec(config: ModelConfig, layout: PageLayout, dtype: torch.dtype, backend: str) -> DecodeSpec:
    return DecodeSpec(
        config.num_q_heads,
        config.num_kv_heads,
        config.head_dim,
        layout.page_size,
        q_dtype=dtype,
        kv_format=layout.kv_format,
        window=config.window,
        # As the engine has it; the pages are full, so there is nothing for its guard to clear.
        mask_unowned_kv=backend_masks_unowned(backend),
    )


def _measure(rows: list[ModelRow], model: Model | HybridModel, config: ModelConfig, layout: PageLayout, options: ModelBenchOptions) -> None:
    """Fill in a case's rows, one for each backend. What it allocates is garbage when it returns."""
    batch, context = rows[0].batch, rows[0].context
    slot_layout = make_slot_layout(config, model.dtype)
    pool = PagePool(layout, 1 + batch * layout.num_pages_for(context), options.device)
    slots = SlotPool(slot_layout, batch, options.device) if slot_layout is not None else None
    fill_pools(pool, slots, options.seed)
    step = make_step(config, layout, batch, context, seed=options.seed)
    runners = []
    for backend in options.attention_backends:
        runner = Runner(model, _spec(config, layout, model.dtype, backend), pool, RunnerConfig(context, batch, backend), slots)
        # The first step compiles, and captures the graph; the second replays it for the first time.
        for _ in range(2):
            result = runner.execute(step)
            assert all(token.token_id is not None for token in result.tokens.values()), "random weights gave logits that are not finite"
        runners.append(runner)
    steps_us = _in_turns([functools.partial(_wall_us, functools.partial(runner.execute, step)) for runner in runners], options.replays)
    graphs = [runner.captured_graph(batch) for runner in runners]
    devices_us = _in_turns([functools.partial(_replay_us, graph) for graph in graphs if graph is not None], options.replays)
    for row, runner, graph, samples_us in zip(rows, runners, graphs, steps_us, strict=True):
        row.attention_backend, row.graph, row.replays = runner.attention_backend, graph is not None, options.replays
        row.step_us = statistics.median(samples_us)
        row.spread = (max(samples_us) - min(samples_us)) / row.step_us
        row.speedup = rows[0].step_us / row.step_us if rows[0].step_us is not None and row is not rows[0] else None
        if graph is not None:
            row.device_us = statistics.median(devices_us.pop(0))
        if options.profile:
            row.kernels = profile_kernels(functools.partial(runner.execute, step), options.device)


def make_step(config: ModelConfig, layout: PageLayout, batch: int, context: int, *, seed: int = 0) -> Step:
    """A decode step of `batch` sequences at their token `context`, each with a token, a slot and shuffled pages of its own."""
    rand = torch.Generator().manual_seed(seed)
    num_pages = layout.num_pages_for(context)
    pages = (torch.randperm(batch * num_pages, generator=rand) + 1).view(batch, num_pages).tolist()
    token_ids = torch.randint(config.vocab_size, (batch, 1), generator=rand).tolist()
    greedy = SamplingParams(temperature=0)
    state_slot = (lambda i: i) if config.linear_layers else (lambda i: None)
    return Step(decodes=[StepRow(i, context - 1, token_ids[i], pages[i], SampleTask(greedy, seed, 0), state_slot(i)) for i in range(batch)])


def fill_pools(pool: PagePool, slots: SlotPool | None, seed: int) -> None:
    """Finite random rows and states, as if every sequence had been computed up to here."""
    rand = torch.Generator(pool.device).manual_seed(seed)
    for rows in _parts(pool):
        if rows.dim() < 4:
            rows.fill_(0.5)  # scales of an fp8 format
        elif rows.dtype.itemsize > 1:
            rows.normal_(generator=rand)
        else:
            rows.copy_(torch.empty(rows.shape, device=pool.device).normal_(generator=rand))
    for layer in range(slots.layout.num_layers if slots is not None else 0):
        assert slots is not None
        slots.states(layer).normal_(0.0, 0.1, generator=rand)
        slots.conv_states(layer).normal_(generator=rand)


def _parts(pool: PagePool) -> Iterator[torch.Tensor]:
    for start in range(0, pool.num_pages, _FILL_PAGES):
        yield from pool.layout.fields(pool.buffer[start : start + _FILL_PAGES])


def _wall_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # One untimed, during which the host queues the timed one: no launch gap is counted.
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def _in_turns(samples: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """So many samples of each, one after the other, the order rotating from round to round."""
    found: list[list[float]] = [[] for _ in samples]
    for i_round in range(rounds if samples else 0):
        for i in range(len(samples)):
            i_sample = (i_round + i) % len(samples)
            found[i_sample].append(samples[i_sample]())
    return found


def give_back(device: torch.device) -> None:
    """Return to the device what the last case, or the making of the model, has left: the next pool is another size."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
