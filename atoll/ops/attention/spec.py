"""What one decode attention call computes: shapes, dtypes and semantics, fixed before any batch is known."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from atoll.errors import SpecError
from atoll.ops.quant.formats import KVFormat, storage_dtype

VLayout = Literal["plain", "transposed"]

MAX_QUERY_LEN = 8
MAX_GROUP_SIZE = 16
MAX_PAGE_SIZE = 1024
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class DecodeSpec:
    """The fixed part of a decode attention call; hashable, so it can key a cache of compiled kernels.

    Query row ``t`` of a sequence stands at position ``seq_len - query_len + t`` (bottom-right causal).
    It attends to key ``j`` when ``j < seq_len``, ``j <= position`` (if `causal`) and ``j > position - window`` (if `window`).

    Raises SpecError for a value that no backend takes.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    query_len: int = 1  # tokens per sequence in this step: 1 for plain decode, k + 1 to verify k drafts
    q_dtype: torch.dtype = torch.bfloat16
    kv_format: KVFormat = "bf16"
    v_layout: VLayout = "plain"  # V pages: plain [P, HKV, S, D], transposed [P, HKV, D, S]
    window: int | None = None  # keys a query sees, itself included; None: all
    causal: bool = True
    sm_scale: float | None = None  # natural base; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # score -> cap * tanh(score / cap), before masking
    sinks: bool = False  # one fp32 logit per query head: one more key, with value zero
    mask_unowned_kv: bool = True  # False: the caller promises that every unowned row is finite
    batch_invariant: bool = False  # a sequence gives the same bits alone and in any batch

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise SpecError(f"num_kv_heads {self.num_kv_heads} is below 1; give the model's count of KV heads")
        if self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise SpecError(
                f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; each KV head must serve the same number of query heads"
            )
        if self.group_size > MAX_GROUP_SIZE:
            raise SpecError(
                f"group size {self.group_size} (num_q_heads {self.num_q_heads} / num_kv_heads {self.num_kv_heads}) "
                f"is above {MAX_GROUP_SIZE}; split the query heads over several calls"
            )
        if not is_power_of_two(self.page_size) or self.page_size > MAX_PAGE_SIZE:
            raise SpecError(_page_size_message(self.page_size))
        if not 1 <= self.query_len <= MAX_QUERY_LEN:
            raise SpecError(f"query_len {self.query_len} is outside 1 to {MAX_QUERY_LEN}; use prefill_attention for longer queries")
        if self.head_dim < 1:
            raise SpecError(f"head_dim {self.head_dim} is below 1; give the model's head dimension")
        if self.q_dtype not in Q_DTYPES:
            raise SpecError(f"q_dtype {self.q_dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")
        storage_dtype(self.kv_format)
        if self.v_layout not in ("plain", "transposed"):
            raise SpecError(f"v_layout {self.v_layout!r} is unknown; use 'plain' or 'transposed'")
        if self.window is not None and self.window < 1:
            raise SpecError(f"window {self.window} is below 1; a query sees at least itself, or pass None for no window")
        if self.sm_scale is not None and not (math.isfinite(self.sm_scale) and self.sm_scale > 0):
            raise SpecError(f"sm_scale {self.sm_scale} is not a positive finite number; None means 1/sqrt(head_dim)")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise SpecError(f"soft_cap {self.soft_cap} is not a positive finite number; None means no cap")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return self.sm_scale if self.sm_scale is not None else self.head_dim**-0.5

    def window_start(self, seq_len: int) -> int:
        """First owned row of a sequence: the left edge of its first query's window, 0 without a window."""
        if self.window is None:
            return 0
        return max(0, seq_len - self.query_len - self.window + 1)


@dataclass(frozen=True)
class PagedKV:
    """One attention layer's cache: strided views of pages. Any strides but a unit innermost one, so NHD and HND both fit."""

    kv_format: KVFormat
    k: torch.Tensor  # [P, HKV, S, D] in the format's storage dtype
    v: torch.Tensor  # plain [P, HKV, S, D], transposed [P, HKV, D, S]
    k_scale: torch.Tensor | None = None  # fp8_tensor [1], fp8_token [P, HKV, S]; fp32; real value = stored * scale
    v_scale: torch.Tensor | None = None
    v_layout: VLayout = "plain"
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # what backends made of these tensors, for all launches

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


def check_kv(spec: DecodeSpec, kv: PagedKV) -> None:
    """Raise SpecError unless `kv` has the shapes, dtypes and scales that `spec` asks for. No device sync."""
    dtype = storage_dtype(spec.kv_format)
    pages = kv.num_pages
    if kv.kv_format != spec.kv_format:
        raise SpecError(f"the cache is {kv.kv_format!r}, the spec asks for {spec.kv_format!r}; change one of them")
    if kv.v_layout != spec.v_layout:
        raise SpecError(f"the cache has {kv.v_layout!r} V, the spec asks for {spec.v_layout!r}; change one of them")
    rows = (pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    v_shape = rows if spec.v_layout == "plain" else (pages, spec.num_kv_heads, spec.head_dim, spec.page_size)
    for name, tensor, shape in (("k", kv.k, rows), ("v", kv.v, v_shape)):
        if tuple(tensor.shape) != shape:
            raise SpecError(f"{name} pages have shape {tuple(tensor.shape)}, the spec asks for {shape} ({spec.v_layout} V); pass a view of that shape")
        if tensor.dtype != dtype:
            raise SpecError(f"{name} pages hold {tensor.dtype}, kv_format {spec.kv_format!r} asks for {dtype}; change one of them")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise SpecError(f"{name} pages have innermost stride {tensor.stride(-1)}, it must be 1; keep rows contiguous")
    if kv.v.device != kv.k.device:
        raise SpecError(f"k pages are on {kv.k.device}, v pages on {kv.v.device}; keep both on one device")
    scale_shape = {"fp8_tensor": (1,), "fp8_token": rows[:3]}.get(spec.kv_format)
    for name, scale in (("k_scale", kv.k_scale), ("v_scale", kv.v_scale)):
        if scale_shape is None:
            if scale is not None:
                raise SpecError(f"{name} is given, but kv_format {spec.kv_format!r} has no scale; pass None")
            continue
        if scale is None:
            raise SpecError(f"{name} is None, kv_format {spec.kv_format!r} asks for fp32 of shape {scale_shape}; pass it")
        if tuple(scale.shape) != scale_shape or scale.dtype != torch.float32:
            raise SpecError(
                f"{name} is {scale.dtype} of shape {tuple(scale.shape)}, kv_format {spec.kv_format!r} asks for torch.float32 of shape {scale_shape}"
            )
        if scale.device != kv.k.device:
            raise SpecError(f"{name} is on {scale.device}, the pages on {kv.k.device}; keep both on one device")


def _page_size_message(page_size: int) -> str:
    if page_size > MAX_PAGE_SIZE:
        return f"page_size {page_size} is above {MAX_PAGE_SIZE}; use {MAX_PAGE_SIZE} or less"
    if page_size < 1:
        return f"page_size {page_size} is below 1; use a power of two from 1 to {MAX_PAGE_SIZE}"
    below = 1 << (page_size.bit_length() - 1)
    return f"page_size {page_size} is not a power of two; use {below} or {2 * below}"
