"""The rows of sequences, read out of their pages in order. Knows no query."""

import functools
from collections.abc import Iterator, Sequence

import torch

from atoll.errors import SpecError
from atoll.ops.attention.spec import DecodeSpec, PagedKV, VLayout, check_kv
from atoll.ops.quant.dequantize import dequantize
from atoll.ops.quant.formats import KVFormat, is_fp8

# Tokens gathered at once: enough that the cost of a call is spread over many short sequences, little enough to bound the fp32 copy.
GATHER_TOKENS = 8192


def check_pages(kv: PagedKV) -> None:
    """Raise SpecError unless the cache's tensors agree with each other and with its format. No device sync."""
    if kv.k.dim() != 4:
        raise SpecError(f"k pages have shape {tuple(kv.k.shape)}, with {kv.k.dim()} dimensions; pass [P, HKV, S, D]")
    _, num_kv_heads, page_size, head_dim = kv.k.shape
    check_kv(_any_spec(num_kv_heads, head_dim, page_size, kv.kv_format, kv.v_layout), kv)


@functools.cache
def _any_spec(num_kv_heads: int, head_dim: int, page_size: int, kv_format: KVFormat, v_layout: VLayout) -> DecodeSpec:
    """A spec that such a cache fits."""
    return DecodeSpec(num_kv_heads, num_kv_heads, head_dim, page_size, kv_format=kv_format, v_layout=v_layout)


def gather_rows(
    kv: PagedKV,
    page_ids: torch.Tensor,  # [>= ceil(stop / S)] int32 or int64, page of each S tokens from token 0 on
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence's tokens `start` to `stop`, dequantized, each `[HKV, stop - start, D]`. No device sync."""
    return next(gather_sequences(kv, [page_ids], [(start, stop)], dtype))


def gather_sequences(
    kv: PagedKV,
    page_ids: Sequence[torch.Tensor],  # of each sequence, as in gather_rows
    spans: Sequence[tuple[int, int]],  # start and stop of each sequence; may be empty
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`gather_rows` of each sequence in turn, several sequences read by one call.

    Only those entries of `page_ids` are dereferenced that hold a token of their span.
    """
    page_size = kv.k.shape[2]
    lanes = [(start // page_size, -(-stop // page_size)) for start, stop in spans]
    for begin, end in _groups([last - first for first, last in lanes], GATHER_TOKENS // page_size):
        ids = torch.cat([page_ids[i][lanes[i][0] : lanes[i][1]] for i in range(begin, end)])
        v_pages = kv.v if kv.v_layout == "plain" else kv.v.transpose(2, 3)
        k = _gather_pages(kv, kv.k, kv.k_scale, ids, dtype)
        v = _gather_pages(kv, v_pages, kv.v_scale, ids, dtype)
        origin = 0  # of the sequence's first page, in tokens
        for (first, last), (start, stop) in zip(lanes[begin:end], spans[begin:end], strict=True):
            low = origin + start - first * page_size
            yield k.narrow(1, low, stop - start), v.narrow(1, low, stop - start)
            origin += (last - first) * page_size


def _groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a list into runs `(begin, end)` whose sizes sum to `limit` at most, or that are one item long."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield begin, i
            begin, total = i, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


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
    if scale is not None and kv.kv_format == "fp8_token":
        scale = scale.index_select(0, ids).unsqueeze(-1)  # [n, HKV, S, 1]
    n, (_, heads, page_size, head_dim) = ids.shape[0], pages.shape
    rows = torch.empty((heads, n, page_size, head_dim), dtype=dtype, device=pages.device)
    # One pass converts and brings the heads to the front.
    dequantize(pages.index_select(0, ids), kv.kv_format, scale, out=rows.transpose(0, 1))
    return rows.view(heads, n * page_size, head_dim)
