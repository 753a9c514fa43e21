"""Compiles the kernels that a benchmark will launch, in parallel processes, into Triton's cache on disk.

Each worker launches every variant once on a batch of empty sequences: compilation follows the spec, the tuning and the strides, never the lengths.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from atoll.bench.shapes import DecodeShape
from atoll.bench.workload import page_layout
from atoll.ops.attention import BatchShape, DecodeConfig, choose_backend, decode_attention, plan_decode
from atoll.ops.attention.combine import merge_shape
from atoll.ops.attention.gluon_decode_sm90 import has_sm_each
from atoll.ops.attention.plan import num_sms
from atoll.probe.parallel import MAX_PROCESSES, process_pool

_POOL_PAGES = 2


@dataclass(frozen=True)
class Variant:
    """One kernel to build: a shape, its flag and its tuning."""

    shape: DecodeShape
    mask_unowned_kv: bool
    config: DecodeConfig
    backend: str = "triton"

    def key(self) -> tuple[object, ...]:
        """Equal for variants that share their compiled kernels: these know what there is to merge, and how, and whether each program has an SM."""
        spec, config, batch = self.shape.spec(mask_unowned_kv=self.mask_unowned_kv), self.config, self.shape.batch
        merge = merge_shape(spec, config.num_splits, batch) if config.num_splits > 1 else None
        each = self.backend == "gluon_sm90" and has_sm_each(spec, config, batch, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        lengths = max(32, triton.next_power_of_2(batch)) if config.num_programs else 1
        config = replace(config, num_splits=min(config.num_splits, 2), tiles_per_split=0, peel_above=0, num_programs=int(bool(config.num_programs)))
        return self.backend, spec, config, merge, each, lengths


def default_config(shape: DecodeShape, device: torch.device, backend: str, *, mask_unowned_kv: bool = True) -> DecodeConfig:
    """What the backend itself chooses for a shape."""
    spec = shape.spec(mask_unowned_kv=mask_unowned_kv)
    _, module, _ = choose_backend(spec, device, backend)
    return module.config(spec, BatchShape(shape.batch, shape.ctx, num_sms(device)))


def compile_variants(variants: Iterable[Variant], *, jobs: int | None = None) -> dict[Variant, str]:
    """Build all variants on the current GPU; returns those that do not fit the device, with the reason."""
    unique = list({variant.key(): variant for variant in variants}.values())
    jobs = min(jobs or MAX_PROCESSES, os.cpu_count() or 1, len(unique))
    if jobs <= 1:
        reasons = [_build(variant) for variant in unique]
    else:
        with process_pool(jobs) as pool:
            reasons = list(pool.map(_build, unique))
    return {variant: reason for variant, reason in zip(unique, reasons, strict=True) if reason is not None}


def _build(variant: Variant) -> str | None:
    shape, spec = variant.shape, variant.shape.spec(mask_unowned_kv=variant.mask_unowned_kv)
    device = torch.device("cuda")
    layout = page_layout(shape)
    scales = [torch.ones(1, device=device)] * 2 if shape.kv_format == "fp8_tensor" else [None, None]
    kv = layout.layer_kv(torch.zeros(_POOL_PAGES, layout.page_bytes, dtype=torch.uint8, device=device), 0, *scales)
    table = torch.zeros(shape.batch, shape.lanes, dtype=torch.int32)
    plan = plan_decode(spec, [0] * shape.batch, table, device=device, backend=variant.backend, max_seq_len=shape.ctx, config=variant.config)
    q = torch.zeros(shape.batch, spec.query_len, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype, device=device)
    try:
        decode_attention(q, kv, plan)
        torch.cuda.synchronize(device)
    except (OutOfResources, CompilationError) as error:
        return str(error)
    except RuntimeError as error:
        # How a pass that gives up on a tuning shows itself; anything else is a fault to see.
        if "PassManager" not in str(error):
            error.add_note(f"while {variant.backend} was built with {variant.config} for {shape.name}")
            raise
        return str(error)
    return None
