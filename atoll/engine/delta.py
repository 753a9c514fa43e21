"""The delta rule of one batch over the state slots: a step for the decode rows, then each chunk in its slot; knows no request."""

from collections.abc import Sequence

import torch

from atoll.engine.batch import PrefillSegment
from atoll.kv.slots import SlotPool
from atoll.ops.delta import delta_prefill, delta_step


class SlotDelta:
    """The `delta` that a hybrid model calls once per linear-attention layer. Decode rows lie first in the batch, then the chunks.

    A row's slot holds the state of its sequence before the row, zeros at its beginning, and then the state after it.
    """

    def __init__(
        self,
        slots: SlotPool,
        decode_slots: torch.Tensor | None,  # [BP] int32, -1 for a padded row; None: no row decodes
        num_decodes: int,
        segments: Sequence[PrefillSegment] = (),
    ) -> None:
        self._slots = slots
        self._decode_slots = decode_slots
        self._num_decodes = num_decodes
        self._segments = segments

    def __call__(self, layer: int, mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        spec = self._slots.layout.spec
        if not self._segments:
            return self._decode(layer, mixed_qkv, conv_weight, g, beta)
        out = mixed_qkv.new_empty((mixed_qkv.shape[0], spec.num_v_heads, spec.v_head_dim))
        if self._num_decodes:
            rows = slice(self._num_decodes)
            out[rows] = self._decode(layer, mixed_qkv[rows], conv_weight, g[rows], beta[rows])
        conv_states, states = self._slots.conv_states(layer), self._slots.states(layer)
        for segment in self._segments:
            assert segment.state_slot is not None
            rows = slice(segment.first, segment.first + segment.count)
            own = (mixed_qkv[rows], g[rows], beta[rows])
            # Resumed at the sequence's beginning too: its slot was cleared.
            delta_prefill(spec, *own, conv_weight, conv_states, states, segment.state_slot, resume=True, out=out[rows])
        return out

    def _decode(self, layer: int, mixed_qkv: torch.Tensor, conv_weight: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        assert self._decode_slots is not None
        # A sequence's bits do not depend on the others in a step, so a mixed step's rows need no padding.
        slots = self._decode_slots[: mixed_qkv.shape[0]]
        conv_states, states = self._slots.conv_states(layer), self._slots.states(layer)
        return delta_step(self._slots.layout.spec, mixed_qkv[:, None], g[:, None], beta[:, None], conv_weight, conv_states, states, slots)[:, 0]
