"""Adapters for FlashInfer 0.6 (`flashinfer-python`, an NVIDIA GPU): its XQA decode kernels and its tensor-core decode wrapper.

Its kernels dereference padded lanes, so they get a table whose padded lanes name page 0, as their callers pad it. The calls are those of the backends.
"""

import math
from types import ModuleType

import torch

from atoll.errors import BackendError
from atoll.ops.attention import flashinfer_tensor_cores, flashinfer_xqa
from atoll.ops.attention.flashinfer_base import cache_refusal, import_flashinfer, make_workspace, shared_workspace
from atoll.ops.attention.flashinfer_tensor_cores import make_wrapper, plan_wrapper, run_wrapper, tensor_scales
from atoll.ops.attention.flashinfer_xqa import run_xqa
from atoll.probe.adapters import Result, Run
from atoll.probe.cases import DecodeProblem


def xqa(problem: DecodeProblem) -> Run:
    """`trtllm_batch_decode_with_kv_cache(backend="xqa")`; fp8 caches run with Q and P in fp8."""
    flashinfer = _import(problem)
    spec = problem.spec
    _refuse(flashinfer_xqa.refusal(spec) or flashinfer_xqa.cache_refusal(problem.kv))
    shortest = min(problem.case.seq_lens)
    if shortest < spec.query_len:
        _refuse(f"XQA is not given sequences shorter than query_len {spec.query_len}, here is one of {shortest}; use --min-seq-len")
    k_scale, v_scale = tensor_scales(problem.kv)
    out = torch.empty_like(problem.q)
    tokens = (problem.q.shape[0] * spec.query_len, spec.num_q_heads, spec.head_dim)
    # One for all problems: calls over many tables, as a cold run's, would else hold one each.
    workspace = shared_workspace(problem.device, "xqa")
    table = problem.safe_page_table()
    lens = problem.seq_lens.to(problem.device).to(torch.uint32)
    mask = _draft_mask(problem) if spec.query_len > 1 else None
    flat_out = out.view(tokens) if spec.query_len == 1 else out

    def call() -> Result:
        q = problem.q.view(tokens)
        run_xqa(flashinfer, flat_out, q, problem.kv, spec, workspace, table, lens, sinks=problem.sinks, mask=mask, k_scale=k_scale, v_scale=v_scale)
        return out, None

    return Run(call, outputs=(out,))


def tensor_cores(problem: DecodeProblem) -> Run:
    """`BatchDecodeWithPagedKVCacheWrapper(use_tensor_cores=True)`."""
    flashinfer = _import(problem)
    spec = problem.spec
    _refuse(flashinfer_tensor_cores.refusal(spec) or cache_refusal(problem.kv))
    k_scale, v_scale = tensor_scales(problem.kv)
    wrapper = make_wrapper(flashinfer, spec, make_workspace(problem.device))
    num_pages = torch.tensor([len(pages) for pages in problem.pages], dtype=torch.int32)
    page_ids = torch.tensor([page for pages in problem.pages for page in pages], dtype=torch.int32)
    plan_wrapper(wrapper, spec, problem.seq_lens.cpu(), num_pages, page_ids)
    out = torch.empty_like(problem.q)
    lse = torch.empty(problem.q.shape[0], spec.num_q_heads, dtype=torch.float32, device=problem.device)

    def call() -> Result:
        run_wrapper(wrapper, out[:, 0], lse, problem.q[:, 0], problem.kv, k_scale, v_scale)
        # FlashInfer's lse is base 2.
        return out, lse[:, None, :] * math.log(2)

    return Run(call, outputs=(out, lse))


def _import(problem: DecodeProblem) -> ModuleType:
    if problem.device.type != "cuda":
        _refuse(f"FlashInfer needs an NVIDIA GPU, the problem is on {problem.device}")
    return import_flashinfer()


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise BackendError(reason)


def _draft_mask(problem: DecodeProblem) -> torch.Tensor:
    """XQA's bit mask `[B, QL, words]` uint16: query token t sees the last QL keys up to its own."""
    batch, length = problem.q.shape[:2]
    rows = torch.tensor([(2 << t) - 1 for t in range(length)], dtype=torch.int32)
    words = torch.zeros(batch, length, (length + 31) // 32 * 2, dtype=torch.int32)
    words[:, :, 0] = rows & 0xFFFF
    return words.to(torch.uint16).to(problem.device)
