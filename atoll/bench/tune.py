"""`bench decode --tune`: which tuning each case would like best, next to what the backend chooses by itself.

Three passes over all cases, each after one parallel build: tile, warps and stages at the default number of splits; of the best few, the number of splits;
of the best few of those, one by one, what else can be tuned. A full product would compile a hundred times as much for little.
A backend that has candidates() of its own is timed on these alone, in one pass.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from atoll.bench.compile import Variant, compile_variants, default_config
from atoll.bench.decode import DecodeBenchOptions, config_name
from atoll.bench.gate import own_fault
from atoll.bench.rows import DecodeRow
from atoll.bench.shapes import DecodeShape, select_shapes
from atoll.bench.timing import Call, estimate_us, repeat_calls, time_interleaved
from atoll.bench.workload import BenchPool
from atoll.errors import ConfigError
from atoll.ops.attention import BatchShape, DecodeConfig, choose_backend, decode_attention, plan_decode
from atoll.ops.attention.costs import decode_costs
from atoll.ops.attention.plan import num_sms

TILES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (2, 3, 4)
# Programs in units of the device's multiprocessors.
WAVES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
OTHER_FIELDS: dict[str, tuple[object, ...]] = {"peel_above": (0, 2, 4, 8, 1 << 20), "max_registers": (None, 128, 168)}
SCREEN_ROUNDS = 3
BEST_KEPT = 2


@dataclass
class Tuned:
    """One case's outcome."""

    shape: DecodeShape
    backend: str
    default: DecodeConfig
    times_us: dict[DecodeConfig, float] = field(default_factory=dict)
    refused: dict[DecodeConfig, str] = field(default_factory=dict)  # what does not fit the device, answers wrongly or leaks

    @property
    def best(self) -> DecodeConfig:
        return min(self.times_us, key=self.times_us.__getitem__)

    def line(self, top: int = 3) -> str:
        ranked = sorted(self.times_us.items(), key=lambda item: item[1])[:top]
        base = self.times_us.get(self.default)
        tried = "  ".join(f"{config_name(config)} {time:.2f}" + (f" ({time / base - 1:+.1%})" if base is not None else "") for config, time in ranked)
        default = f"{base:.2f} us" if base is not None else f"not measured: {self.refused[self.default]}"
        refused = "".join(f"\n    {config_name(config)} left out: {why}" for config, why in self.refused.items() if config != self.default)
        return f"{self.shape.name:<36} default {config_name(self.default)} {default} | best {tried}{refused}"

    def rows(self, seed: int, run: str | None = None) -> Iterator[DecodeRow]:
        costs = decode_costs(self.shape.spec(), self.shape.lengths(seed))
        for config in [*self.times_us, *self.refused]:
            row = DecodeRow(self.shape.name, self.shape.batch, self.shape.ctx, self.backend, True, 0, "warm", costs.bytes, costs.flops, run=run)
            row.time_us, row.config, row.note = self.times_us.get(config), config_name(config), self.refused.get(config)
            yield row


def run_tune(options: DecodeBenchOptions, on_case: Callable[[Tuned], None] = lambda tuned: None) -> list[Tuned]:
    """Sweep the tuning of every chosen case, masked, warm L2, each candidate checked before it is timed; `on_case` gets the last pass, case by case.

    After `options.budget_s` no case is begun. Raises ConfigError without a GPU or when no case matches.
    """
    if options.device.type != "cuda":
        raise ConfigError(f"--tune on {options.device} has no kernel to tune; run it on a GPU")
    shapes = select_shapes(options.shapes, name_filter=options.name_filter, limit=options.limit)
    if not shapes:
        raise ConfigError(f"no case of --shapes {options.shapes} contains {options.name_filter!r}; names look like 35b-tp1/bf16/p16/q1/16x1024")
    backend, module, _ = choose_backend(shapes[0].spec(), options.device, options.backend)
    deadline = time.monotonic() + options.budget_s if options.budget_s is not None else None
    all_tuned = [Tuned(shape, backend, default_config(shape, options.device, backend)) for shape in shapes]
    pool = BenchPool(shapes, options.device, seed=options.seed)
    if hasattr(module, "candidates"):
        _measure(all_tuned, lambda tuned: _own_candidates(tuned, module, options.device), pool, backend, options, options.rounds, deadline, on_case)
        return all_tuned
    _measure(all_tuned, lambda tuned: _kernel_candidates(tuned.default), pool, backend, options, SCREEN_ROUNDS, deadline)
    _measure(all_tuned, lambda tuned: _split_candidates(tuned, options.device), pool, backend, options, SCREEN_ROUNDS, deadline)
    _measure(all_tuned, _other_candidates, pool, backend, options, options.rounds, deadline, on_case)
    return all_tuned


def _measure(
    all_tuned: list[Tuned],
    candidates: Callable[[Tuned], list[DecodeConfig]],
    pool: BenchPool,
    backend: str,
    options: DecodeBenchOptions,
    rounds: int,
    deadline: float | None,
    on_case: Callable[[Tuned], None] = lambda tuned: None,
) -> None:
    """Build every candidate, leave out those that do not fit the device, and time the rest of each case interleaved.

    Times replace those of earlier passes: only what was interleaved in one pass is compared.
    """
    wanted = {tuned.shape: candidates(tuned) for tuned in all_tuned}
    variants = {shape: [Variant(shape, True, config, backend) for config in configs] for shape, configs in wanted.items()}
    refused = {v.key(): why for v, why in compile_variants([v for vs in variants.values() for v in vs], jobs=options.jobs).items()}
    for tuned in all_tuned:
        if deadline is not None and time.monotonic() > deadline:
            break
        tuned.times_us, tuned.refused = {}, {}
        work = pool.workload(tuned.shape)
        calls: dict[str, list[Call]] = {}
        by_name: dict[str, DecodeConfig] = {}
        for variant in variants[tuned.shape]:
            if variant.key() in refused:
                tuned.refused[variant.config] = refused[variant.key()]
                continue
            plan = plan_decode(tuned.shape.spec(), work.lengths, work.tables[0], backend=backend, max_seq_len=tuned.shape.ctx, config=variant.config)
            _, fault = own_fault(work, plan, decode_attention(work.q, work.kv, plan)[0])
            if fault is not None:
                tuned.refused[variant.config] = fault
                continue
            own = work.calls(plan)
            by_name[config_name(variant.config)] = variant.config
            calls[config_name(variant.config)] = repeat_calls(own, estimate_us(own[0], options.device))
        timings = time_interleaved(calls, options.device, rounds=rounds) if calls else {}
        tuned.times_us = {by_name[name]: timing.median_us for name, timing in timings.items()}
        on_case(tuned)


def _own_candidates(tuned: Tuned, module: ModuleType, device: torch.device) -> list[DecodeConfig]:
    shape = tuned.shape
    found = module.candidates(shape.spec(), BatchShape(shape.batch, shape.ctx, num_sms(device)))
    return list(dict.fromkeys([tuned.default, *found]))


def _kernel_candidates(default: DecodeConfig) -> list[DecodeConfig]:
    """Tile, warps and stages. A stage holds a tile of K and of V, so long tiles come with few stages."""
    found = [replace(default, tile=t, num_warps=w, num_stages=s) for t in TILES for w in WARPS for s in STAGES if t * s <= 256]
    return list(dict.fromkeys([default, *found]))


def _split_candidates(tuned: Tuned, device: torch.device) -> list[DecodeConfig]:
    programs = tuned.shape.batch * tuned.shape.heads.num_kv_heads
    found = [tuned.default]
    for config in sorted(tuned.times_us, key=tuned.times_us.__getitem__)[:BEST_KEPT]:
        max_splits = math.ceil(tuned.shape.ctx / config.tile)
        counts = {1, config.num_splits, *(int(wave * num_sms(device) / programs) for wave in WAVES)}
        found += [replace(config, num_splits=n) for n in sorted(counts) if 1 <= n <= max_splits]
    return list(dict.fromkeys(found))


def _other_candidates(tuned: Tuned) -> list[DecodeConfig]:
    found = [tuned.default]
    for config in sorted(tuned.times_us, key=tuned.times_us.__getitem__)[:BEST_KEPT]:
        found.append(config)
        found += [replace(config, **{name: value}) for name, values in OTHER_FIELDS.items() for value in values]  # type: ignore[arg-type]
    return list(dict.fromkeys(found))
