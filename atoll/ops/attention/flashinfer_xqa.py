"""FlashInfer's XQA decode kernels as a backend. Rows left of a window leak; with fp8 caches, where Q and P are fp8 too, rows right of a sequence as well."""

import functools
from types import ModuleType

import torch

from atoll.errors import BackendError
from atoll.ops.attention import flashinfer_base
from atoll.ops.attention.flashinfer_base import backend_refusal, import_flashinfer, import_refusal, nhd_pages, shared_workspace, spec_refusal
from atoll.ops.attention.plan import BatchShape, DecodeConfig, DecodePlan
from atoll.ops.attention.spec import DecodeSpec, PagedKV

MASKS_UNOWNED = False
# Not tried: its launch reads nothing back, but the host's part of it has not been seen to stay out of a capture.
GRAPH_SAFE = False

PAGE_SIZES = (16, 32, 64, 128)
CAPABILITIES = (9, 10, 12)  # major


def supports(spec: DecodeSpec, device: torch.device) -> str | None:
    """Why this backend cannot run `spec` on `device`, or None if it can."""
    reason = backend_refusal(spec, device) or refusal(spec) or import_refusal()
    if reason is None and _capability(device) not in CAPABILITIES:
        reason = f"XQA runs on compute capability {', '.join(f'{major}.x' for major in CAPABILITIES)}, not {_capability(device)}.x"
    return reason


def refusal(spec: DecodeSpec) -> str | None:
    """What XQA does not take of a spec, wherever it runs."""
    if (reason := spec_refusal(spec)) is not None:
        return reason
    if spec.page_size not in PAGE_SIZES:
        return f"XQA takes page_size 16, 32, 64 or 128, not {spec.page_size}"
    if spec.soft_cap is not None:
        return "XQA has no soft cap"
    if spec.query_len > 1 and spec.window is not None:
        return "XQA's draft mask is not combined with a window here"
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= 256:
        return f"XQA takes head_dim 16 to 256 in steps of 16, not {spec.head_dim}"
    return None


def cache_refusal(kv: PagedKV) -> str | None:
    """Strides that XQA does not take."""
    if (reason := flashinfer_base.cache_refusal(kv)) is not None:
        return reason
    odd = [stride for stride in kv.k.stride()[:3] if stride % kv.k.shape[3]]
    return f"XQA counts strides in rows, and {odd[0]} elements are no multiple of head_dim {kv.k.shape[3]}" if odd else None


def config(spec: DecodeSpec, shape: BatchShape) -> DecodeConfig:
    """It tunes itself."""
    return DecodeConfig()


def prepare(plan: DecodePlan, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
    """The table with padded lanes that name page 0, and lengths of at least 1, which is what its kernels take; on the device, without a wait."""
    lanes = torch.arange(plan.page_table.shape[1], device=plan.page_table.device)
    num_pages = (plan.seq_lens + plan.spec.page_size - 1) // plan.spec.page_size
    plan.prepared["table"] = torch.where(lanes < num_pages[:, None], plan.page_table, 0)
    plan.prepared["lens"] = plan.seq_lens.clamp(min=1).view(torch.uint32)


def decode(q: torch.Tensor, kv: PagedKV, plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Fill `out`; see `decode_attention`. These kernels give no lse: it is NaN, so that a merge with it shows."""
    if (reason := cache_refusal(kv)) is not None:
        raise BackendError(f"{reason}; change the cache's layout, or use another attention backend")
    tokens = (plan.batch, plan.spec.num_q_heads, plan.spec.head_dim)
    result = torch.empty(tokens, dtype=out.dtype, device=out.device)
    q = q.reshape(tokens).contiguous()
    workspace, table, lens = shared_workspace(q.device, "xqa"), plan.prepared["table"], plan.prepared["lens"]
    run_xqa(import_flashinfer(), result, q, kv, plan.spec, workspace, table, lens, sinks=sinks, k_scale=kv.k_scale, v_scale=kv.v_scale)
    out.copy_(torch.where((plan.seq_lens > 0)[:, None, None], result, 0)[:, None])
    lse.fill_(torch.nan)


def run_xqa(
    flashinfer: ModuleType,
    out: torch.Tensor,  # [B * QL, HQ, D], written
    q: torch.Tensor,  # [B * QL, HQ, D]
    kv: PagedKV,
    spec: DecodeSpec,
    workspace: torch.Tensor,
    table: torch.Tensor,  # [B, MP] int32; padded lanes name a page
    lens: torch.Tensor,  # [B] uint32, each at least QL
    *,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,  # of drafts: [B, QL, words] uint16
    k_scale: torch.Tensor | float | None = None,  # as numbers, or as device tensors [1] without a wait
    v_scale: torch.Tensor | float | None = None,
) -> None:
    """One call of `trtllm_batch_decode_with_kv_cache(backend="xqa")`."""
    flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        q,
        nhd_pages(kv),
        workspace,
        table,
        lens,
        table.shape[1] * spec.page_size,
        bmm1_scale=spec.scale if k_scale is None else k_scale * spec.scale,
        bmm2_scale=1.0 if v_scale is None else v_scale,
        window_left=-1 if spec.window is None else spec.window - 1,
        out=out,
        sinks=sinks,
        kv_layout="NHD",
        backend="xqa",
        q_len_per_req=spec.query_len,
        mask=mask,
    )


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
