"""What FlashInfer's decode kernels have in common: where they run, which caches they take, their workspace. For `flashinfer-python` 0.6 on an NVIDIA GPU.

They read K and V at any strides, the same for both, so a page-major pool fits. Padded lanes of a table they dereference.
"""

import functools
import importlib
from types import ModuleType

import torch

from atoll.errors import BackendError
from atoll.ops.attention.spec import DecodeSpec, PagedKV

WORKSPACE_BYTES = 256 * 2**20


def import_flashinfer() -> ModuleType:
    """Raises BackendError where it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise BackendError(f"flashinfer cannot be imported: {error}; install flashinfer-python") from error


def spec_refusal(spec: DecodeSpec) -> str | None:
    """What no FlashInfer decode kernel takes."""
    if not spec.causal:
        return "FlashInfer's decode kernels are causal"
    if spec.v_layout != "plain":
        return "FlashInfer takes plain V alone"
    if spec.kv_format == "fp8_token":
        return "FlashInfer has no scale per token"
    if spec.kv_format == "fp32":
        return "FlashInfer has no fp32 cache"
    if spec.q_dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer takes q in bf16 or fp16, not {spec.q_dtype}"
    return None


def cache_refusal(kv: PagedKV) -> str | None:
    """Strides that no FlashInfer decode kernel takes."""
    if kv.k.stride() != kv.v.stride():
        return "FlashInfer takes one set of strides for K and V"
    if kv.k.stride(2) % 16 != 0:
        return f"FlashInfer takes rows aligned to 16 bytes, not a row stride of {kv.k.stride(2)} elements"
    return None


def backend_refusal(spec: DecodeSpec, device: torch.device) -> str | None:
    """Why no FlashInfer kernel can be the backend of a plan for `spec` on `device`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"FlashInfer needs an NVIDIA GPU, the device is {device}"
    if spec.mask_unowned_kv:
        return "it does not mask unowned rows, and the spec asks for that; set mask_unowned_kv=False"
    if spec.query_len > 1:
        return f"query_len {spec.query_len} is above 1, and here it decodes one token per sequence"
    return spec_refusal(spec)


def import_refusal() -> str | None:
    """Why FlashInfer is not here."""
    try:
        import_flashinfer()
    except BackendError as error:
        return str(error)
    return None


def nhd_pages(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches as `[P, S, HKV, D]` views, whatever their strides."""
    return kv.k.transpose(1, 2), kv.v.transpose(1, 2)


def make_workspace(device: torch.device) -> torch.Tensor:
    """Zeros, as the kernels' semaphores must start."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def shared_workspace(device: torch.device, kernels: str) -> torch.Tensor:
    """One workspace for all plans of one kind of kernel on a device: a stream runs one at a time. Another kind would leave its own bytes in the semaphores."""
    return make_workspace(device)
