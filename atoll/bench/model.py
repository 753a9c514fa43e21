"""`bench model`: decode steps of a model of a given shape, random weights and pools already full, through the engine's own runner."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
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
from atoll.ops.attention import DecodeSpec
from atoll.ops.quant.formats import KVFormat

# Beside weights, pages and slots: workspaces, activations, the CUDA context; and per sequence three copies of its logits in fp32.
SPARE_BYTES = 3 << 30
LOGIT_COPIES = 3
_FILL_PAGES = 256  # fp8 pages are filled through fp32 copies, this many pages at a time
_TABLE_KERNELS = 12  # kernels of a profile that are listed by name


@dataclass(frozen=True)
class ModelBenchOptions:
    """What to measure: every batch at every context."""

    shape: str = "qwen3.5-35b-a3b"
    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (1024,)  # tokens of each sequence, the new one included
    kv_format: str = "bf16"
    page_size: int = 16  # tokens
    replays: int = 30  # measured steps; the median counts
    profile: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None  # None: the model loader's choice for the device
    attention_backend: str = "auto"
    seed: int = 0


@dataclass
class ModelRow:
    """One batch at one context."""

    shape: str
    batch: int
    context: int  # tokens
    kv_format: str
    page_size: int  # tokens
    dtype: str
    attention_backend: str | None = None
    graph: bool | None = None  # whether the steps replayed a CUDA graph
    replays: int = 0
    step_us: float | None = None  # a whole step of the runner, batch building and sampling included
    spread: float | None = None  # (longest - shortest) / step_us
    device_us: float | None = None  # the graph alone, on the device's clock; None without a graph
    kernels: list[KernelTime] | None = None  # None: not profiled
    note: str | None = None  # why a time is missing

    @property
    def tokens_per_s(self) -> float | None:
        return self.batch / self.step_us * 1e6 if self.step_us else None


def run_model(options: ModelBenchOptions, on_row: Callable[[ModelRow], None] = lambda row: None) -> list[ModelRow]:
    """Measure every case that fits in memory beside the weights; the others become rows with a note.

    Each sequence has its own random token, keys, values and states, so that tokens go to different experts. The same step runs again and again: it rewrites
    its last row of keys and values, and its states move on.

    Raises ConfigError for a shape that is unknown or does not fit, a batch or context out of range.
    """
    config = _check(options)
    dtype = options.dtype or default_dtype(options.device)
    weights = RandomWeights(config, options.device, seed=options.seed)
    _check_fits(options, weights.num_elements() * dtype.itemsize)
    model = make_model(config, weights, options.device, dtype)
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            row = ModelRow(options.shape, batch, context, options.kv_format, options.page_size, str(dtype).removeprefix("torch."))
            give_back(options.device)
            needed, free = _case_bytes(config, options, batch, context, dtype), _free_bytes(options.device)
            if free is not None and needed > free:
                row.note = f"needs {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} are free"
            else:
                try:
                    _measure(row, model, config, options)
                except (PoolError, torch.OutOfMemoryError) as error:
                    row.note = f"ran out of memory: {str(error).splitlines()[0]}"
            rows.append(row)
            on_row(row)
    return rows


def row_lines(row: ModelRow) -> list[str]:
    """The case's time and rate, then the kernels it went to."""
    head = f"{row.shape} batch {row.batch:>3} context {row.context:>6}"
    if row.step_us is None or row.tokens_per_s is None:
        return [f"{head}: {row.note}"]
    device = f", on the device {row.device_us:.0f} us" if row.device_us is not None else ""
    lines = [f"{head}: {row.step_us:9.0f} us a step{device}, {row.tokens_per_s:9.1f} tokens/s"]
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
    return config


def _check_fits(options: ModelBenchOptions, num_bytes: int) -> None:
    free = _free_bytes(options.device)
    if free is not None and num_bytes > free:
        raise ConfigError(f"{options.shape} has {num_bytes / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB are free on {options.device}; use the shape 'tiny'")


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is left on a GPU; None on a CPU, where the system pages out and nothing certain can be said."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _case_bytes(config: ModelConfig, options: ModelBenchOptions, batch: int, context: int, dtype: torch.dtype) -> int:
    layout, slot_layout = _page_layout(config, options), make_slot_layout(config, dtype)
    page_bytes = (1 + batch * layout.num_pages_for(context)) * layout.page_bytes
    slot_bytes = batch * slot_layout.slot_bytes if slot_layout is not None else 0
    return page_bytes + slot_bytes + batch * config.vocab_size * torch.float32.itemsize * LOGIT_COPIES + SPARE_BYTES


def _page_layout(config: ModelConfig, options: ModelBenchOptions) -> PageLayout:
    return PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, options.page_size, cast(KVFormat, options.kv_format))


def _measure(row: ModelRow, model: Model | HybridModel, config: ModelConfig, options: ModelBenchOptions) -> None:
    """Fill in the row. What it allocates is garbage when it returns."""
    layout, slot_layout = _page_layout(config, options), make_slot_layout(config, model.dtype)
    pool = PagePool(layout, 1 + row.batch * layout.num_pages_for(row.context), options.device)
    slots = SlotPool(slot_layout, row.batch, options.device) if slot_layout is not None else None
    fill_pools(pool, slots, options.seed)
    spec = DecodeSpec(
        config.num_q_heads, config.num_kv_heads, config.head_dim, options.page_size, q_dtype=model.dtype, kv_format=layout.kv_format, window=config.window
    )
    runner = Runner(model, spec, pool, RunnerConfig(row.context, row.batch, options.attention_backend), slots)
    step = make_step(config, layout, row.batch, row.context, seed=options.seed)
    # The first step compiles, and captures the graph; the second replays it for the first time.
    for _ in range(2):
        result = runner.execute(step)
        assert all(token.token_id is not None for token in result.tokens.values()), "random weights gave logits that are not finite"
    graph = runner.captured_graph(row.batch)
    samples_us = [_wall_us(lambda: runner.execute(step)) for _ in range(options.replays)]
    row.attention_backend, row.graph, row.replays = runner.attention_backend, graph is not None, options.replays
    row.step_us = statistics.median(samples_us)
    row.spread = (max(samples_us) - min(samples_us)) / row.step_us
    if graph is not None:
        row.device_us = statistics.median(_replay_us(graph, options.replays))
    if options.profile:
        row.kernels = profile_kernels(lambda: runner.execute(step), options.device)


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


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    # One untimed, during which the host queues the timed ones: no launch gap is counted.
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]


def give_back(device: torch.device) -> None:
    """Return to the device what the last case, or the making of the model, has left: the next pool is another size."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
