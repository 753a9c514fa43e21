"""Attention of one batch over the pool: appends each layer's new rows, then decodes and prefills; knows no request."""

from collections.abc import Sequence

import torch

from atoll.engine.batch import PrefillSegment
from atoll.ops.attention import DecodePlan, DecodeSpec, PagedKV, append_kv, decode_attention, prefill_attention


class PagedAttend:
    """The `attend` that a model calls once per layer. Decode rows lie first in the batch, then the chunks."""

    def __init__(
        self,
        layers: Sequence[PagedKV],
        spec: DecodeSpec,
        slots: torch.Tensor,  # [T] int64
        plan: DecodePlan | None,  # None: no row decodes
        num_decodes: int,
        segments: Sequence[PrefillSegment] = (),
    ) -> None:
        self._layers = layers
        self._spec = spec
        self._slots = slots
        self._plan = plan
        self._num_decodes = num_decodes
        self._segments = segments

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = self._layers[layer]
        # Before any read: a token attends to itself, and a chunk to its own earlier tokens.
        append_kv(kv, k, v, self._slots)
        if not self._segments:
            return self._decode(q, kv)
        out = torch.empty_like(q)
        if self._num_decodes:
            out[: self._num_decodes] = self._decode(q[: self._num_decodes], kv)
        for segment in self._segments:
            rows = slice(segment.first, segment.first + segment.count)
            out[rows] = prefill_attention(
                q[rows],
                kv,
                segment.page_ids,
                segment.seq_len,
                sm_scale=self._spec.sm_scale,
                window=self._spec.window,
                soft_cap=self._spec.soft_cap,
            )
        return out

    def _decode(self, q: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        plan = self._plan
        assert plan is not None
        num_rows = q.shape[0]
        if num_rows < plan.batch:
            # The same plan, so the same bits, as a step that only decodes; rows of seq_len 0 read nothing.
            q = torch.cat([q, q.new_zeros(plan.batch - num_rows, *q.shape[1:])])
        out, _ = decode_attention(q[:, None], kv, plan)
        return out[:num_rows, 0]
