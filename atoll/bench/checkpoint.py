"""`bench checkpoint`: what an image of a state costs, and what the guard costs, on pools of a model's shape without the model. Knows no request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar, cast

import torch

from atoll.bench.model import give_back
from atoll.bench.timing import Call, measure_read_gbps, time_eager, time_queued
from atoll.engine.build import make_slot_layout
from atoll.engine.step import StateCopy
from atoll.errors import ConfigError, PoolError
from atoll.kv.images import num_image_pages, restore_states, save_states
from atoll.kv.layout import PageLayout
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotLayout, SlotPool
from atoll.models.loader import load_config
from atoll.models.model_config import ModelConfig
from atoll.models.random_model import SHAPES
from atoll.ops.quant.formats import KVFormat

Operation = Literal["save", "restore", "clear"]
Item = TypeVar("Item")

CALLS = 4  # of one sample; each moves other bytes, so that a large state does not come from a cache
STATE_DTYPE = torch.bfloat16  # of conv states; a GPU's default, and here a CPU's too, so that sizes are the same


@dataclass(frozen=True)
class CheckpointBenchOptions:
    """What to measure: every shape, in every format, at every page size."""

    shapes: tuple[str, ...] = ("tiny",)  # of random_model.SHAPES, or a model's name or path, of which only the config is read
    kv_formats: tuple[str, ...] = ("bf16", "fp8_tensor", "fp8_token")
    page_sizes: tuple[int, ...] = (16, 64)  # tokens
    states: tuple[int, ...] = (1, 4, 16, 64)  # copied in one call
    tokens: tuple[int, ...] = (1024, 16384)  # of one sequence whose pages are cleared in one call
    rounds: int = 5
    step_us: float | None = None  # a decode step's time, for the guard's share of it
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0


@dataclass
class CheckpointRow:
    """One operation of one size. Times are per call."""

    shape: str
    kv_format: str
    page_size: int  # tokens
    slot_bytes: int
    page_bytes: int
    image_pages: int
    operation: Operation  # save: slots -> pages, restore: pages -> slots, clear: zeros -> pages, as the guard does
    num_states: int | None  # saved or restored; of a clear 1: the pages of one image, None: those of a sequence's tokens
    num_tokens: int | None  # of the sequence whose pages are cleared
    num_pages: int  # of the call
    moved_bytes: int  # what is read and what is written: a copy counts its bytes twice, a clear once
    wall_us: float | None = None  # as the engine calls it; calls one after another, the device waited for after the last
    wall_spread: float | None = None  # (longest - shortest) / wall_us
    host_us: float | None = None  # until the call returns
    device_us: float | None = None  # on the device's clock, the index's upload included; None on a CPU
    device_spread: float | None = None
    read_gbps: float | None = None  # of a plain reduction in this run; None on a CPU
    step_us: float | None = None  # as given
    note: str | None = None  # why a time is missing

    @property
    def image_tokens(self) -> int:
        """Tokens whose keys and values would fill an image's pages."""
        return self.image_pages * self.page_size

    @property
    def time_us(self) -> float | None:
        """On the device's clock where it was taken, else the wall's."""
        return self.device_us if self.device_us is not None else self.wall_us

    @property
    def gbps(self) -> float | None:
        return self.moved_bytes / self.time_us / 1e3 if self.time_us else None

    @property
    def read_share(self) -> float | None:
        """Of the rate at which a plain reduction reads."""
        return self.gbps / self.read_gbps if self.gbps and self.read_gbps else None

    @property
    def us_per_page(self) -> float | None:
        return self.time_us / self.num_pages if self.time_us else None

    @property
    def step_share(self) -> float | None:
        """A clear in one decode step, as a share of the step without it."""
        return self.time_us / self.step_us if self.operation == "clear" and self.time_us and self.step_us else None


@dataclass
class CheckpointReport:
    """All rows of a run, and what was wrong in it."""

    rows: list[CheckpointRow] = field(default_factory=list)
    gate_failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Case:
    """Pools of random bytes, and who holds what in them: an image for every slot, at scattered pages."""

    slots: SlotPool
    pool: PagePool
    copies: list[StateCopy]
    pages: list[int]  # all but the null page, shuffled as in a pool in long use

    @classmethod
    def make(cls, slot_layout: SlotLayout, layout: PageLayout, options: CheckpointBenchOptions) -> "_Case":
        num_states, image_pages = max(options.states), num_image_pages(slot_layout.slot_bytes, layout.page_bytes)
        num_pages = 1 + max(num_states * image_pages, *(layout.num_pages_for(tokens) for tokens in options.tokens))
        rand = torch.Generator().manual_seed(options.seed)
        pages = (torch.randperm(num_pages - 1, generator=rand) + 1).tolist()
        copies = [
            StateCopy(slot, tuple(pages[i * image_pages : (i + 1) * image_pages])) for i, slot in enumerate(torch.randperm(num_states, generator=rand).tolist())
        ]
        slots = SlotPool(slot_layout, num_states, options.device, "random", seed=options.seed)
        return cls(slots, PagePool(layout, num_pages, options.device, "random", seed=options.seed + 1), copies, pages)

    def calls(self, row: CheckpointRow) -> list[Call]:
        """A sample's calls for one row."""
        if row.operation == "clear":
            return [partial(self.pool.clear, pages) for pages in _take_turns(self.pages, row.num_pages)]
        copy_states = save_states if row.operation == "save" else restore_states
        assert row.num_states is not None
        return [partial(copy_states, self.slots, self.pool, copies) for copies in _take_turns(self.copies, row.num_states)]


def run_checkpoint(options: CheckpointBenchOptions, on_case: Callable[[list[CheckpointRow]], None] = lambda rows: None) -> CheckpointReport:
    """Measure every case; `on_case` gets the rows of one shape, format and page size as soon as they are there.

    Each case is checked first: a state that is saved, cleared and restored is the same in every byte, and a clear zeroes its pages and no other. A case
    that fails, or does not fit in memory, becomes rows with a note and without times.

    Raises ConfigError for a shape without states and for counts out of range, ModelError for a shape that is no model, SpecError for a bad format or page size.
    """
    shapes = {name: _check_shape(name) for name in options.shapes}
    _check_counts(options)
    layouts = {
        (name, page_size, kv_format): PageLayout(config.num_attention_layers, config.num_kv_heads, config.head_dim, page_size, cast(KVFormat, kv_format))
        for name, (config, _) in shapes.items()
        for kv_format in options.kv_formats
        for page_size in options.page_sizes
    }
    report = CheckpointReport()
    read_gbps = measure_read_gbps(options.device)
    for (name, _, _), layout in layouts.items():
        slot_layout = shapes[name][1]
        rows = _make_rows(name, slot_layout, layout, options, read_gbps)
        give_back(options.device)
        try:
            note = _measure(rows, slot_layout, layout, options)
        except (PoolError, torch.OutOfMemoryError) as error:
            note = f"ran out of memory: {str(error).splitlines()[0]}"
        else:
            report.gate_failures += [f"{_case_name(rows[0])}: {note}"] if note is not None else []
        for row in rows:
            row.note = note if row.wall_us is None else None
        report.rows += rows
        on_case(rows)
    return report


def case_lines(rows: Sequence[CheckpointRow]) -> list[str]:
    """Sizes of a case, then a line for each operation."""
    row = rows[0]
    sizes = f"slot {row.slot_bytes / 1e6:.3f} MB, page {row.page_bytes / 1e6:.3f} MB, an image takes {row.image_pages} pages or {row.image_tokens} tokens"
    return [f"{_case_name(row)}: {sizes}", *(f"  {_row_text(row)}" for row in rows)]


def _row_text(row: CheckpointRow) -> str:
    is_clear = row.operation == "clear"
    count, noun = (row.num_tokens, "token") if row.num_tokens is not None else (row.num_states, "image" if is_clear else "state")
    head = f"{row.operation:<7} {count:>5} {noun + ('s' if count != 1 else ''):<6} {row.num_pages:>6} pages"
    if row.wall_us is None or row.gbps is None:
        return f"{head}: not measured: {row.note}"
    device = f"{row.device_us:9.1f} us on the device, " if row.device_us is not None else ""
    text = f"{head}: {device}{row.wall_us:9.1f} us a call ({row.host_us:.1f} host), {row.gbps:7.1f} GB/s {'written' if is_clear else 'read and written'}"
    text += f", {row.read_share:.0%} of a plain read" if row.read_share is not None else ""
    text += f", {row.us_per_page:.3f} us a page" if is_clear else ""
    return text + (f", {row.step_share:.2%} of a step" if row.step_share is not None else "")


def _case_name(row: CheckpointRow) -> str:
    return f"{row.shape} {row.kv_format} page {row.page_size}"


def _check_shape(name: str) -> tuple[ModelConfig, SlotLayout]:
    config = SHAPES.get(name) or load_config(name)
    slot_layout = make_slot_layout(config, STATE_DTYPE)
    if slot_layout is None:
        raise ConfigError(f"shape {name!r} has no linear-attention layer, so no state to checkpoint; use {', '.join(SHAPES)}, demo, or another hybrid model")
    return config, slot_layout


def _check_counts(options: CheckpointBenchOptions) -> None:
    for name, counts in (("states", options.states), ("tokens", options.tokens), ("rounds", (options.rounds,))):
        if not counts or min(counts) < 1:
            raise ConfigError(f"{name} {counts} holds none, or one below 1; give numbers of 1 or more")


def _make_rows(shape: str, slot_layout: SlotLayout, layout: PageLayout, options: CheckpointBenchOptions, read_gbps: float | None) -> list[CheckpointRow]:
    """A case's rows, not measured yet."""
    slot_bytes, page_bytes = slot_layout.slot_bytes, layout.page_bytes
    image_pages = num_image_pages(slot_bytes, page_bytes)

    make = partial(CheckpointRow, shape, layout.kv_format, layout.page_size, slot_bytes, page_bytes, image_pages, read_gbps=read_gbps, step_us=options.step_us)
    copies: tuple[Operation, ...] = ("save", "restore")
    rows = [make(operation, n, None, n * image_pages, 2 * n * slot_bytes) for operation in copies for n in options.states]
    rows.append(make("clear", 1, None, image_pages, image_pages * page_bytes))
    for num_tokens in options.tokens:
        num_pages = layout.num_pages_for(num_tokens)
        rows.append(make("clear", None, num_tokens, num_pages, num_pages * page_bytes))
    return rows


def _measure(rows: list[CheckpointRow], slot_layout: SlotLayout, layout: PageLayout, options: CheckpointBenchOptions) -> str | None:
    """Fill in the rows' times, or return what the gate found. What it allocates is garbage when it returns."""
    case = _Case.make(slot_layout, layout, options)
    fault = _image_fault(case) or _clear_fault(case, max(row.num_pages for row in rows if row.operation == "clear"))
    if fault is not None:
        return fault
    for row in rows:
        calls = case.calls(row)
        for call in calls:
            # The first of its kind compiles.
            call()
        eager = time_eager(calls, options.device, rounds=options.rounds)
        row.wall_us, row.wall_spread, row.host_us = eager.wall.median_us, eager.wall.spread, eager.host_us
        queued = time_queued(calls, options.device, eager.host_us, rounds=options.rounds)
        if queued is not None:
            row.device_us, row.device_spread = queued.median_us, queued.spread
    return None


def _image_fault(case: _Case) -> str | None:
    before = case.slots.buffer.clone()
    save_states(case.slots, case.pool, case.copies)
    case.slots.clear(range(case.slots.num_slots))
    restore_states(case.slots, case.pool, case.copies)
    num_wrong = sum(not torch.equal(state, saved) for state, saved in zip(case.slots.buffer, before, strict=True))
    return f"{num_wrong} of {case.slots.num_slots} restored states are not what was saved" if num_wrong else None


def _clear_fault(case: _Case, num_pages: int) -> str | None:
    pages = case.pages[:num_pages]
    expected = case.pool.buffer.clone()
    expected[torch.tensor(pages, device=case.pool.device)] = 0
    case.pool.clear(pages)
    return None if torch.equal(case.pool.buffer, expected) else f"a clear of {num_pages} pages left bytes in them, or changed another page"


def _take_turns(items: Sequence[Item], size: int) -> list[list[Item]]:
    """CALLS lists of `size` distinct items, each going on where the last ended."""
    return [[items[(i * size + j) % len(items)] for j in range(size)] for i in range(CALLS)]
