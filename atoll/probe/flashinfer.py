"""Adapters for FlashInfer 0.6 (`flashinfer-python`, an NVIDIA GPU): its XQA decode kernels and its tensor-core decode wrapper.

Its kernels dereference padded lanes, so they get a table whose padded lanes name page 0, as their callers pad it.
"""

import importlib
import math
from types import ModuleType

import torch

from atoll.errors import BackendError
from atoll.ops.quant.formats import is_fp8
from atoll.probe.adapters import Result, Run
from atoll.probe.cases import DecodeProblem

_WORKSPACE_BYTES = 256 * 2**20


def xqa(problem: DecodeProblem) -> Run:
    """`trtllm_batch_decode_with_kv_cache(backend="xqa")`; fp8 caches run with Q and P in fp8."""
    flashinfer = _import(problem)
    spec = problem.spec
    _refuse(spec.page_size not in (16, 32, 64, 128), f"XQA takes page_size 16, 32, 64 or 128, not {spec.page_size}")
    _refuse(spec.soft_cap is not None, "XQA has no soft cap")
    _refuse(spec.query_len > 1 and spec.window is not None, "XQA's draft mask is not combined with a window here")
    shortest = min(problem.case.seq_lens)
    _refuse(shortest < spec.query_len, f"XQA is not given sequences shorter than query_len {spec.query_len}, here is one of {shortest}; use --min-seq-len")
    k_scale, v_scale = _tensor_scales(problem)
    out = torch.empty_like(problem.q)
    tokens = (problem.q.shape[0] * spec.query_len, spec.num_q_heads, spec.head_dim)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    table = problem.safe_page_table()
    lens = problem.seq_lens.to(problem.device).to(torch.uint32)
    mask = _draft_mask(problem) if spec.query_len > 1 else None
    flat_out = out.view(tokens) if spec.query_len == 1 else out

    def call() -> Result:
        flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            problem.q.view(tokens),
            _nhd_pages(problem),
            workspace,
            table,
            lens,
            table.shape[1] * spec.page_size,
            bmm1_scale=spec.scale * k_scale,
            bmm2_scale=v_scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            out=flat_out,
            sinks=problem.sinks,
            kv_layout="NHD",
            backend="xqa",
            q_len_per_req=spec.query_len,
            mask=mask,
        )
        return out, None

    return Run(call, outputs=(out,))


def tensor_cores(problem: DecodeProblem) -> Run:
    """`BatchDecodeWithPagedKVCacheWrapper(use_tensor_cores=True)`."""
    flashinfer = _import(problem)
    spec = problem.spec
    _refuse(spec.query_len > 1, f"the decode wrapper takes one query token, not {spec.query_len}")
    _refuse(spec.sinks, "the decode wrapper's plain kernels have no sinks")
    k_scale, v_scale = _tensor_scales(problem)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    counts = torch.tensor([len(pages) for pages in problem.pages], dtype=torch.int32)
    lens = problem.seq_lens
    wrapper.plan(
        torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]).to(problem.device),
        torch.tensor([page for pages in problem.pages for page in pages], dtype=torch.int32, device=problem.device),
        torch.where(lens > 0, (lens - 1) % spec.page_size + 1, 0).to(torch.int32).to(problem.device),
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.page_size,
        window_left=-1 if spec.window is None else spec.window - 1,
        logits_soft_cap=spec.soft_cap,
        q_data_type=spec.q_dtype,
        kv_data_type=problem.kv.k.dtype,
        sm_scale=spec.scale,
    )
    out = torch.empty_like(problem.q)
    lse = torch.empty(problem.q.shape[0], spec.num_q_heads, dtype=torch.float32, device=problem.device)

    def call() -> Result:
        wrapper.run(problem.q[:, 0], _nhd_pages(problem), k_scale=k_scale, v_scale=v_scale, out=out[:, 0], lse=lse, return_lse=True)
        # FlashInfer's lse is base 2.
        return out, lse[:, None, :] * math.log(2)

    return Run(call, outputs=(out, lse))


def _import(problem: DecodeProblem) -> ModuleType:
    _refuse(problem.device.type != "cuda", f"FlashInfer needs an NVIDIA GPU, the problem is on {problem.device}")
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise BackendError(f"flashinfer cannot be imported: {error}; install flashinfer-python") from error


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise BackendError(reason)


def _tensor_scales(problem: DecodeProblem) -> tuple[float, float]:
    """Scales as numbers, 1 for a format without; refuses what no FlashInfer decode kernel takes."""
    spec, kv = problem.spec, problem.kv
    _refuse(not spec.causal, "FlashInfer's decode kernels are causal")
    _refuse(spec.v_layout != "plain", "FlashInfer takes plain V alone")
    _refuse(spec.kv_format == "fp8_token", "FlashInfer has no scale per token")
    _refuse(spec.q_dtype not in (torch.bfloat16, torch.float16), f"FlashInfer takes q in bf16 or fp16, not {spec.q_dtype}")
    _refuse(kv.k.stride() != kv.v.stride(), "FlashInfer takes one set of strides for K and V")
    _refuse(kv.k.stride(2) % 16 != 0, f"FlashInfer takes rows aligned to 16 bytes, not a row stride of {kv.k.stride(2)} elements")
    if not is_fp8(spec.kv_format) or kv.k_scale is None or kv.v_scale is None:
        return 1.0, 1.0
    return float(kv.k_scale), float(kv.v_scale)


def _nhd_pages(problem: DecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches as `[P, S, HKV, D]` views, whatever their strides."""
    return problem.kv.k.transpose(1, 2), problem.kv.v.transpose(1, 2)


def _draft_mask(problem: DecodeProblem) -> torch.Tensor:
    """XQA's bit mask `[B, QL, words]` uint16: query token t sees the last QL keys up to its own."""
    batch, length = problem.q.shape[:2]
    rows = torch.tensor([(2 << t) - 1 for t in range(length)], dtype=torch.int32)
    words = torch.zeros(batch, length, (length + 31) // 32 * 2, dtype=torch.int32)
    words[:, :, 0] = rows & 0xFFFF
    return words.to(torch.uint16).to(problem.device)
