"""Write fresh K and V rows into pages, quantizing where the format asks; knows slots, not sequences."""

import torch

from atoll.errors import SpecError
from atoll.ops.attention.gather import check_pages
from atoll.ops.attention.spec import PagedKV
from atoll.ops.quant.formats import is_fp8
from atoll.ops.quant.quantize import quantize


def append_kv(
    kv: PagedKV,
    k: torch.Tensor,  # [T, HKV, D] any floating dtype
    v: torch.Tensor,  # [T, HKV, D]
    slots: torch.Tensor,  # [T] int64, page * page_size + offset; -1: write nothing
) -> None:
    """Store row `i` of `k` and `v` in token slot `slots[i]` of every KV head; writes nothing else.

    `fp8_tensor` divides by the cache's scale, `fp8_token` computes and writes the row's own. Finite values saturate, and no NaN or Inf becomes a
    number (the table in `ops/quant/quantize.py`). On a GPU one kernel, no sync, fit for a CUDA graph.

    Edge: a slot named twice keeps one of its rows, which one is not defined.
    Raises: SpecError for a shape, dtype or device that does not fit the cache. A slot outside the pool is found on a CPU only; on a GPU it is the caller's bug.
    """
    _check(kv, k, v, slots)
    if slots.shape[0] == 0:
        return
    if kv.k.device.type == "cuda":
        # Imported here, since a CPU install may lack Triton.
        from atoll.ops.attention.triton_append import append_kv_triton

        append_kv_triton(kv, k, v, slots)
    else:
        append_kv_torch(kv, k, v, slots)


def append_kv_torch(kv: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """The plain definition of `append_kv`; reads the slots on the host."""
    num_pages, _, page_size, _ = kv.k.shape
    low, high = (int(x) for x in torch.aminmax(slots))
    if low < -1 or high >= num_pages * page_size:
        bad = low if low < -1 else high
        raise SpecError(f"slot {bad} is outside the pool's 0 to {num_pages * page_size - 1}; pass page * page_size + offset, or -1 to write nothing")
    if low < 0:
        written = slots >= 0
        k, v, slots = k[written], v[written], slots[written]
    page, offset = slots // page_size, slots % page_size
    v_pages = kv.v if kv.v_layout == "plain" else kv.v.transpose(2, 3)
    for pages, scale, rows in ((kv.k, kv.k_scale, k), (v_pages, kv.v_scale, v)):
        stored, token_scale = quantize(rows, kv.kv_format, scale)
        if is_fp8(kv.kv_format):
            # As bytes: not every device scatters float8.
            pages, stored = pages.view(torch.uint8), stored.view(torch.uint8)
        pages[page, :, offset] = stored
        if token_scale is not None:
            assert scale is not None
            scale[page, :, offset] = token_scale


def _check(kv: PagedKV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    check_pages(kv)
    _, num_kv_heads, _, head_dim = kv.k.shape
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise SpecError(f"slots is {slots.dtype} of shape {tuple(slots.shape)}; pass int64 of shape [T]")
    for name, rows in (("k", k), ("v", v)):
        shape = (slots.shape[0], num_kv_heads, head_dim)
        if tuple(rows.shape) != shape or not rows.is_floating_point():
            raise SpecError(f"{name} is {rows.dtype} of shape {tuple(rows.shape)}, slots and the cache ask for floating rows of shape {shape}; pass those")
    for name, tensor in (("k", k), ("v", v), ("slots", slots)):
        if tensor.device != kv.k.device:
            raise SpecError(f"{name} is on {tensor.device}, the cache on {kv.k.device}; put both on one device")
