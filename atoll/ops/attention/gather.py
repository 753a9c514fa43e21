"""The rows of one sequence, read out of its pages in order. Knows no query and no batch."""

import torch

from atoll.ops.attention.spec import PagedKV
from atoll.ops.quant.dequantize import dequantize
from atoll.ops.quant.formats import is_fp8


def gather_rows(
    kv: PagedKV,
    page_ids: torch.Tensor,  # [>= ceil(stop / S)] int32 or int64, page of each S tokens from token 0 on
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens `start` to `stop`, dequantized, each `[HKV, stop - start, D]`.

    Only the entries of `page_ids` that hold these tokens are dereferenced. No device sync.
    """
    page_size = kv.k.shape[2]
    first = start // page_size
    ids = page_ids[first : -(-stop // page_size)]
    rows = slice(start - first * page_size, stop - first * page_size)
    v_pages = kv.v if kv.v_layout == "plain" else kv.v.transpose(2, 3)
    k = _gather_pages(kv, kv.k, kv.k_scale, ids, dtype)
    v = _gather_pages(kv, v_pages, kv.v_scale, ids, dtype)
    return k[:, rows], v[:, rows]


def _gather_pages(
    kv: PagedKV,
    pages: torch.Tensor,  # [P, HKV, S, D]
    scale: torch.Tensor | None,  # [1] or [P, HKV, S]
    ids: torch.Tensor,  # [n]
    dtype: torch.dtype,
) -> torch.Tensor:  # [HKV, n * S, D]
    if is_fp8(kv.kv_format):
        # As bytes: not every device gathers float8.
        pages = pages.view(torch.uint8)
    chosen = pages.index_select(0, ids)  # [n, HKV, S, D]
    if scale is not None and kv.kv_format == "fp8_token":
        scale = scale.index_select(0, ids).unsqueeze(-1)  # [n, HKV, S, 1]
    if is_fp8(kv.kv_format):
        chosen = dequantize(chosen, kv.kv_format, scale)
    n, heads, page_size, head_dim = chosen.shape
    # One pass converts the dtype and brings the heads to the front.
    rows = torch.empty((heads, n, page_size, head_dim), dtype=dtype, device=chosen.device)
    return rows.copy_(chosen.transpose(0, 1)).view(heads, n * page_size, head_dim)
