"""Makes an engine of a loaded model and a configuration: settles every "auto", sizes the pool, wires the parts; runs nothing."""

import logging
import math
import os
from dataclasses import replace
from typing import cast

import torch

from atoll.config import PREFILL_GRID, EngineConfig, SchedulerConfig, checkpoint_policies
from atoll.engine.engine import Engine
from atoll.engine.runner import Runner, RunnerConfig
from atoll.engine.text import Tokenizer
from atoll.errors import ConfigError
from atoll.kv.fills import Fill
from atoll.kv.guard import ReleaseGuard
from atoll.kv.images import num_image_pages
from atoll.kv.layout import PageLayout
from atoll.kv.ledger import NULL_PAGE
from atoll.kv.pool import PagePool, num_pages_for_bytes
from atoll.kv.slots import SlotLayout, SlotPool
from atoll.models.base import HybridModel, Model
from atoll.models.model_config import ModelConfig
from atoll.offload.base_worker import Offload, Regions
from atoll.offload.build import make_offload
from atoll.offload.identity import make_identity
from atoll.ops.attention import DecodeSpec, backend_masks_unowned
from atoll.ops.delta import DeltaSpec
from atoll.ops.quant.formats import KVFormat

log = logging.getLogger(__name__)

# For pages and state slots together:
CPU_POOL_BYTES = 2 * 2**30  # at most; and a quarter of the machine's memory
GPU_POOL_SHARE = 0.85  # of what is free once the weights are loaded: the rest is for activations, logits and graphs

MIN_LADDER_TOKENS = 1024  # below it the pauses of the prefill cost more than the tokens that a sequence which leaves another computes again


def choose_device(name: str) -> torch.device:
    """Raises ConfigError for a name that is no device, and for a GPU that torch does not see."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdecimal())):
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda, or a GPU by its number, such as cuda:1")
    if kind == "cuda" and len(index) > 2:
        raise ConfigError(f"device {name!r} has a number above 99; use the number of a GPU that is here")
    device = torch.device(name)
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= num_gpus:
            raise ConfigError(f"device {name!r} was asked for, torch {torch.__version__} sees {num_gpus} GPUs; use 'cpu', or install a torch for your GPU")
        device = torch.device("cuda", device.index or 0)
    return device


def choose_dtype(name: str) -> torch.dtype | None:
    """None for "auto": the loader knows which one the device computes fastest."""
    return {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def make_engine(model: Model | HybridModel, shape: ModelConfig, tokenizer: Tokenizer, config: EngineConfig, offload: Offload | None = None) -> Engine:
    """`offload`: instead of what config.offload names.

    Raises ConfigError for sizes that do not fit, SpecError or BackendError for a model that no attention backend takes.
    """
    kv_format = cast(KVFormat, "bf16" if config.kv_format == "auto" else config.kv_format)
    spec = DecodeSpec(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, config.page_size, q_dtype=model.dtype, kv_format=kv_format, window=shape.window)
    masks = backend_masks_unowned(config.attention_backend)
    if not masks:
        spec = replace(spec, mask_unowned_kv=False)
    layout = PageLayout(shape.num_attention_layers, shape.num_kv_heads, shape.head_dim, config.page_size, kv_format)
    slot_layout = make_slot_layout(shape, model.dtype)
    num_pages = choose_num_pages(config, layout, shape.max_position, model.device, slot_layout)
    sizes = choose_sizes(config, shape.max_position, num_pages, choose_image_pages(config, layout, slot_layout))
    guard = make_guard(config, num_pages, masks=masks)
    pool = PagePool(layout, num_pages, model.device, cast(Fill, config.kv_fill), on_free=guard.released if guard is not None else None)
    if guard is not None:
        # Padded lanes name it, and nothing ever writes to it.
        pool.clear([NULL_PAGE])
    # One for each sequence of a step.
    slots = SlotPool(slot_layout, config.max_num_seqs, model.device, cast(Fill, config.kv_fill)) if slot_layout is not None else None
    _log_sizes(pool, slots)
    runner_config = RunnerConfig(sizes.max_model_len, sizes.max_num_seqs, config.attention_backend, config.cuda_graphs)
    if config.offload is not None or offload is not None:
        offload = connect(config, model, shape, pool, slot_layout, sizes.image_pages, offload)
    runner = Runner(model, spec, pool, runner_config, slots, offload.worker if offload is not None else None)
    return Engine(runner, pool, tokenizer, sizes, vocab_size=shape.vocab_size, seed=config.seed, slots=slots, guard=guard, offload=offload)


def connect(
    config: EngineConfig,
    model: Model | HybridModel,
    shape: ModelConfig,
    pool: PagePool,
    slot_layout: SlotLayout | None,
    image_pages: int,
    offload: Offload | None,
) -> Offload:
    """The connector that was given, or the one that config.offload names, with its worker told of the pool. Raises ConfigError for options that do not fit."""
    if slot_layout is not None and not image_pages:
        raise ConfigError(
            "offload is given and no state is kept, without which no prefix of this model can be fetched; give more pages, a lower max_model_len, "
            "or state_checkpoint_interval_tokens other than 0"
        )
    regions = Regions(pool.buffer, image_pages)
    if offload is None:
        assert config.offload is not None
        identity = make_identity(
            model,
            shape,
            pool.layout,
            dtype=model.dtype,
            device=pool.device,
            scales=(pool.k_scales, pool.v_scales),
            slot_bytes=slot_layout.slot_bytes if slot_layout is not None else 0,
            image_pages=image_pages,
        )
        offload = make_offload(config.offload, identity, regions, config.offload_timeout_s)
    offload.worker.register(regions)
    return offload


def make_guard(config: EngineConfig, num_pages: int, *, masks: bool) -> ReleaseGuard | None:
    """None where no page is to be zeroed; "auto" is on for an attention backend that does not mask. Pages of any fill but zero are the first to be zeroed."""
    if config.guard == "off" and not masks:
        log.warning("attention backend %s does not mask unowned rows and the guard is off: what a page held before may reach outputs", config.attention_backend)
    if config.guard == "off" or (config.guard == "auto" and masks):
        return None
    return ReleaseGuard(dirty=() if config.kv_fill == "zero" else range(NULL_PAGE + 1, num_pages))


def make_slot_layout(shape: ModelConfig, dtype: torch.dtype) -> SlotLayout | None:
    """What a sequence's state looks like in a slot; None for a model that keeps no state."""
    delta = shape.delta
    if delta is None:
        return None
    return SlotLayout(len(shape.linear_layers), DeltaSpec(delta.num_k_heads, delta.num_v_heads, delta.k_head_dim, delta.v_head_dim, delta.conv_width, dtype))


def choose_image_pages(config: EngineConfig, layout: PageLayout, slot_layout: SlotLayout | None) -> int:
    """Pages of one checkpoint; 0: the model keeps no state, or none is to be kept for other requests."""
    if slot_layout is None or not config.prefix_caching or config.state_checkpoint_interval_tokens == 0:
        return 0
    return num_image_pages(slot_layout.slot_bytes, layout.page_bytes)


def choose_checkpoint_interval(config: EngineConfig, image_pages: int) -> int:
    """Tokens between the ladder's checkpoints, whole pages that end on the prefill grid, so that they cut no chunk off it; -1: no ladder."""
    interval = config.state_checkpoint_interval_tokens
    if interval is None:
        interval = max(MIN_LADDER_TOKENS, image_pages * config.page_size)
    if interval <= 0:
        return -1
    unit = math.lcm(config.page_size, PREFILL_GRID)
    return -(-interval // unit) * unit


def choose_sizes(config: EngineConfig, max_position: int, num_pages: int, image_pages: int) -> SchedulerConfig:
    """All that the scheduler must know. A pool that cannot hold a full sequence and one checkpoint keeps no checkpoint, and says so."""
    max_model_len = choose_max_model_len(config, max_position, num_pages, image_pages)
    if image_pages and num_pages - 1 < image_pages + -(-max_model_len // config.page_size):
        # Left open, max_model_len grows with the pool and leaves room for a state once that is half of it (choose_max_model_len).
        beside = -(-(config.max_model_len or max_position) // config.page_size)
        least = 1 + image_pages + (beside if config.max_model_len is not None else min(beside, image_pages))
        log.warning(
            "prefixes are not reused: a sequence of max_model_len %d tokens and one state of %d pages do not fit in %d pages together; "
            "give num_pages %d or more (one is never allocated), or lower max_model_len",
            max_model_len,
            image_pages,
            num_pages - 1,
            least,
        )
        image_pages = 0
    return SchedulerConfig(
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
        image_pages=image_pages,
        checkpoint_interval=choose_checkpoint_interval(config, image_pages),
        checkpoint_policies=checkpoint_policies(config.checkpoint_policy),
        offload_timeout_s=config.offload_timeout_s,
    )


def choose_num_pages(config: EngineConfig, layout: PageLayout, max_position: int, device: torch.device, slot_layout: SlotLayout | None = None) -> int:
    """Pages of the pool, the null page included: as asked for, else max_num_seqs full sequences of two checkpoints each, within what state slots leave."""
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_memory_bytes is not None:
        return num_pages_for_bytes(layout, config.kv_memory_bytes)
    longest = config.max_model_len or max_position
    useful = 1 + config.max_num_seqs * (-(-longest // config.page_size) + 2 * choose_image_pages(config, layout, slot_layout))
    budget_bytes = _memory_budget_bytes(device)
    if slot_layout is not None:
        slots_bytes = config.max_num_seqs * slot_layout.slot_bytes
        if slots_bytes + 2 * layout.page_bytes > budget_bytes:
            raise ConfigError(
                f"max_num_seqs {config.max_num_seqs} state slots of {slot_layout.slot_bytes} bytes take {slots_bytes} of the {budget_bytes} bytes "
                f"for slots and pages on {device}; lower max_num_seqs, or give num_pages or kv_memory_bytes if you know that both fit"
            )
        budget_bytes -= slots_bytes
    return min(useful, num_pages_for_bytes(layout, budget_bytes))


def choose_max_model_len(config: EngineConfig, max_position: int, num_pages: int, image_pages: int = 0) -> int:
    """Tokens of the longest sequence. A given length that the model or the pool cannot hold is an error; left open, it is the lower of the two.

    Left open, it leaves room for one checkpoint where that takes at most half of the pool: without it no prefix could be reused.
    """
    capacity = (num_pages - 1) * config.page_size
    if config.max_model_len is None:
        room = image_pages if 2 * image_pages <= num_pages - 1 else 0
        return min(max_position, capacity - room * config.page_size)
    if config.max_model_len > max_position:
        raise ConfigError(f"max_model_len {config.max_model_len} is above the model's {max_position} positions; use {max_position} or less")
    if config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the {capacity} tokens that a pool of {num_pages} pages holds, one of which is never allocated; "
            f"use {capacity} or less, or num_pages {1 - (-config.max_model_len // config.page_size)} or more, or kv_memory_bytes for as many"
        )
    return config.max_model_len


def _log_sizes(pool: PagePool, slots: SlotPool | None) -> None:
    log.info("pool: %d pages of %d bytes, %.2f GB on %s", pool.num_pages, pool.layout.page_bytes, pool.num_bytes / 1e9, pool.device)
    if slots is not None:
        log.info("state slots: %d of %d bytes, %.2f GB", slots.num_slots, slots.layout.slot_bytes, slots.num_bytes / 1e9)


def _memory_budget_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * GPU_POOL_SHARE)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(CPU_POOL_BYTES, machine_bytes // 4)
