"""FlashInfer's `BatchDecodeWithPagedKVCacheWrapper` with tensor cores as a backend. Rows left of a sliding window leak."""

import math
from types import ModuleType
from typing import Any

import torch

from atoll.errors import BackendError
from atoll.ops.attention.flashinfer_base import backend_refusal, cache_refusal, import_flashinfer, import_refusal, nhd_pages, shared_workspace, spec_refusal
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV
from atoll.ops.quant.formats import is_fp8, storage_dtype

MASKS_UNOWNED = False
GRAPH_SAFE = False  # its plan, made anew each step, is part of the launch

HEAD_DIMS = (64, 128, 256)


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Why this backend cannot run `spec` on `device`, or None if it can."""
    return backend_refusal(spec, device) or refusal(spec) or import_refusal()


def refusal(spec: DecodeSpec) -> str | None:
    """What the wrapper does not take of a spec, wherever it runs."""
    if (reason := spec_refusal(spec)) is not None:
        return reason
    if spec.query_len > 1:
        return f"the decode wrapper takes one query token, not {spec.query_len}"
    if spec.sinks:
        return "the decode wrapper's plain kernels have no sinks"
    if spec.head_dim not in HEAD_DIMS:
        return f"the decode wrapper takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
    return None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """It tunes itself."""
    return DecodeConfig()


def prepare(plan: DecodePlan, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
    """The wrapper's own plan, which it makes on the host: from lengths and table as they were given, so without a wait where that was on the host."""
    lens = torch.zeros(plan.batch, dtype=torch.int32)
    lens[: seq_lens.shape[0]] = seq_lens.cpu()
    num_pages = (lens + plan.spec.page_size - 1) // plan.spec.page_size
    table = page_table.cpu()
    lanes = torch.arange(table.shape[1]) < num_pages[: table.shape[0], None]
    plan.prepared["any"] = bool(lens.any())
    plan.prepared["padded"] = bool((lens == 0).any())
    if not plan.prepared["any"]:
        return
    if "wrapper" not in plan.prepared:
        device = plan.seq_lens.device
        plan.prepared["wrapper"] = make_wrapper(import_flashinfer(), plan.spec, shared_workspace(device, "tensor cores"))
    plan_wrapper(plan.prepared["wrapper"], plan.spec, lens, num_pages, table[lanes])


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Fill `out` and `lse`; see `decode_attention`. A scale per tensor is read back, which waits for the device."""
    if (reason := cache_refusal(kv)) is not None:
        raise BackendError(f"{reason}; change the cache's layout, or use another attention backend")
    if not plan.prepared["any"]:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    result = torch.empty((plan.batch, *out.shape[2:]), dtype=out.dtype, device=out.device)
    log2_sums = torch.empty(result.shape[:2], dtype=torch.float32, device=out.device)
    run_wrapper(plan.prepared["wrapper"], result, log2_sums, q[:, 0], kv, *tensor_scales(kv))
    out.copy_(result[:, None])
    torch.mul(log2_sums[:, None], math.log(2), out=lse)
    if plan.prepared["padded"]:
        empty = plan.seq_lens == 0
        out.masked_fill_(empty[:, None, None, None], 0)
        lse.masked_fill_(empty[:, None, None], -torch.inf)


def make_wrapper(flashinfer: ModuleType, spec: DecodeSpec, workspace: torch.Tensor) -> Any:
    # By itself it takes the FlashAttention-3 kernels on Hopper, which are not known to mix Q in 16 bits with a cache in 8.
    backend = "fa2" if is_fp8(spec.kv_format) else "auto"
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend=backend)


def plan_wrapper(
    wrapper: Any,
    spec: DecodeSpec,
    lens: torch.Tensor,  # [B] int32 on the host
    num_pages: torch.Tensor,  # [B] int32 on the host, of each sequence
    page_ids: torch.Tensor,  # [sum of num_pages] int32
) -> None:
    """One `plan` of the wrapper."""
    wrapper.plan(
        torch.cat([torch.zeros(1, dtype=torch.int32), num_pages.cumsum(0, dtype=torch.int32)]),
        page_ids,
        torch.where(lens > 0, (lens - 1) % spec.page_size + 1, 0).to(torch.int32),
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.page_size,
        window_left=-1 if spec.window is None else spec.window - 1,
        logits_soft_cap=spec.soft_cap,
        q_data_type=spec.q_dtype,
        kv_data_type=storage_dtype(spec.kv_format),
        sm_scale=spec.scale,
    )


def run_wrapper(
    wrapper: Any,
    out: torch.Tensor,  # [B, HQ, D], written
    log2_sums: torch.Tensor,  # [B, HQ] fp32, written: the lse in base 2
    q: torch.Tensor,  # [B, HQ, D]
    kv: PagedKV,
    k_scale: float,
    v_scale: float,
) -> None:
    """One `run` of the wrapper."""
    wrapper.run(q, nhd_pages(kv), k_scale=k_scale, v_scale=v_scale, out=out, lse=log2_sums, return_lse=True)


def tensor_scales(kv: PagedKV) -> tuple[float, float]:
    """Scales of K and V as numbers, 1 for a format without."""
    if not is_fp8(kv.kv_format) or kv.k_scale is None or kv.v_scale is None:
        return 1.0, 1.0
    return float(kv.k_scale), float(kv.v_scale)
