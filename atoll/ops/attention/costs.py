"""What one decode attention call must read, write and compute, counted from its spec and lengths. Knows no kernel and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.ops.attention.spec import DecodeSpec
from atoll.ops.quant.formats import storage_dtype


@dataclass(frozen=True)
class DecodeCosts:
    """The least work of a call: every byte counted once, padded query rows and masked scores not at all."""

    bytes: int
    flops: int


def decode_costs(spec: DecodeSpec, seq_lens: Sequence[int]) -> DecodeCosts:
    """Bytes of owned K and V rows, scales, q, out, lse, lengths and used table entries; flops of Q.K and P.V (2 per multiply-add)."""
    return DecodeCosts(
        bytes=sum(_sequence_bytes(spec, n) for n in seq_lens) + _tensor_scale_bytes(spec),
        flops=sum(4 * spec.num_q_heads * spec.head_dim * _scores(spec, n) for n in seq_lens),
    )


def kv_row_bytes(spec: DecodeSpec) -> int:
    """Bytes of one token's K and V rows of all heads, with its scales."""
    scale = torch.float32.itemsize if spec.kv_format == "fp8_token" else 0
    return 2 * spec.num_kv_heads * (spec.head_dim * storage_dtype(spec.kv_format).itemsize + scale)


def _sequence_bytes(spec: DecodeSpec, seq_len: int) -> int:
    start = spec.window_start(seq_len)
    pages = -(-seq_len // spec.page_size) - start // spec.page_size if seq_len else 0
    query_rows = spec.query_len * spec.num_q_heads
    q_and_out = 2 * query_rows * spec.head_dim * spec.q_dtype.itemsize
    lse = query_rows * torch.float32.itemsize
    table_and_length = (pages + 1) * torch.int32.itemsize
    return (seq_len - start) * kv_row_bytes(spec) + q_and_out + lse + table_and_length


def _tensor_scale_bytes(spec: DecodeSpec) -> int:
    return 2 * torch.float32.itemsize if spec.kv_format == "fp8_tensor" else 0


def _scores(spec: DecodeSpec, seq_len: int) -> int:
    """Query-key pairs of one sequence and one head that are attended to."""
    pairs = 0
    for i_t in range(spec.query_len):
        position = seq_len - spec.query_len + i_t
        stop = min(seq_len, position + 1) if spec.causal else seq_len
        start = 0 if spec.window is None else max(0, position - spec.window + 1)
        pairs += max(0, stop - start)
    return pairs
