"""State slots: where a running sequence's recurrent and conv states lie, and the one buffer of them all; knows no model, no page and no request."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from atoll.errors import PoolError, SpecError
from atoll.kv.fills import Fill, check_fill, fill_buffer
from atoll.kv.slot_ledger import SlotLedger
from atoll.ops.delta.spec import DeltaSpec

# A GPU's cache line, as for the fields of a page: no two fields share one, and each starts where the widest loads want it.
FIELD_ALIGN_BYTES = 128


@dataclass(frozen=True)
class SlotLayout:
    """Offsets inside a slot, and the views of a buffer `[R, slot_bytes]` of uint8 that follow from them.

    ::

        | state 0 | conv state 0 | state 1 | conv state 1 | ... |
          one slot = one span of slot_bytes;  every field 128-byte aligned

    A field is contiguous within its slot: the recurrent state `[HV, DK, DV]` in fp32, the conv state `[conv_dim, W - 1]` in `spec.dtype`. No view copies;
    strides and offsets are int64.

    Raises SpecError for a model without linear layers: it keeps no state.
    """

    num_layers: int  # linear-attention layers; others keep nothing in a slot
    spec: DeltaSpec

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise SpecError(f"num_layers {self.num_layers} is below 1; give the model's count of linear-attention layers")

    @property
    def state_bytes(self) -> int:
        """One layer's recurrent state, without padding."""
        num_heads, k_dim, v_dim = self.spec.state_shape
        return num_heads * k_dim * v_dim * torch.float32.itemsize

    @property
    def conv_state_bytes(self) -> int:
        """One layer's conv state, without padding."""
        num_channels, num_inputs = self.spec.conv_state_shape
        return num_channels * num_inputs * self.spec.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Span of one slot, padding included: what a running sequence's state costs, however long the sequence."""
        return self.num_layers * self._layer_bytes

    def state_offset(self, layer: int) -> int:
        """Byte offset in a slot of a layer's recurrent state."""
        return self._check_layer(layer) * self._layer_bytes

    def conv_state_offset(self, layer: int) -> int:
        """Byte offset in a slot of a layer's conv state."""
        return self.state_offset(layer) + _align(self.state_bytes)

    def states(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's recurrent states: a view [R, HV, DK, DV] of fp32."""
        return self._view(buffer, self.state_offset(layer), self.state_bytes, torch.float32, self.spec.state_shape)

    def conv_states(self, buffer: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's conv states: a view [R, conv_dim, W - 1] of `spec.dtype`."""
        return self._view(buffer, self.conv_state_offset(layer), self.conv_state_bytes, self.spec.dtype, self.spec.conv_state_shape)

    def fields(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Every field of every layer, as views."""
        for layer in range(self.num_layers):
            yield self.states(buffer, layer)
            yield self.conv_states(buffer, layer)

    @property
    def _layer_bytes(self) -> int:
        return _align(self.state_bytes) + _align(self.conv_state_bytes)

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise SpecError(f"layer {layer} is outside 0 to {self.num_layers - 1}; count linear-attention layers only")
        return layer

    def _view(self, buffer: torch.Tensor, offset: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The field at `offset` of every slot, as `dtype` of shape `[R, *shape]`."""
        if buffer.dtype != torch.uint8 or buffer.dim() != 2 or buffer.shape[1] != self.slot_bytes or not buffer.is_contiguous():
            layout = "contiguous" if buffer.is_contiguous() else "strided"
            asked = f"contiguous torch.uint8 of shape [R, {self.slot_bytes}]"
            raise SpecError(f"the buffer is {layout} {buffer.dtype} of shape {tuple(buffer.shape)}, the layout asks for {asked}; pass that")
        return buffer[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape)


class SlotPool:
    """States of all linear-attention layers of the running sequences: `buffer` [R, slot_bytes] holds them, `ledger` says which slots are held.

    `fill` is what every slot holds before its first use, and a slot that comes back keeps what it holds: a new holder clears it first. So no fill changes a
    result; all but "zero" are there to prove that. The fills are those of the page pool.

    Raises ConfigError for a bad `num_slots` or `fill`, PoolError when the device has not enough memory.
    """

    def __init__(self, layout: SlotLayout, num_slots: int, device: torch.device | str, fill: Fill = "zero", *, seed: int = 0) -> None:
        check_fill(fill)
        self.ledger = SlotLedger(num_slots)
        self.layout = layout
        self.buffer = fill_buffer(_make_buffer(layout, num_slots, torch.device(device)), fill, layout.fields, seed=seed)  # [R, slot_bytes] uint8
        self._states = [layout.states(self.buffer, layer) for layer in range(layout.num_layers)]
        self._conv_states = [layout.conv_states(self.buffer, layer) for layer in range(layout.num_layers)]

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def num_slots(self) -> int:
        return self.ledger.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer."""
        return self.num_slots * self.layout.slot_bytes

    def states(self, layer: int) -> torch.Tensor:
        """One linear-attention layer's recurrent states [R, HV, DK, DV] fp32: a view of the buffer, the same object at every call."""
        return self._states[self._check_layer(layer)]

    def conv_states(self, layer: int) -> torch.Tensor:
        """One linear-attention layer's conv states [R, conv_dim, W - 1]: a view of the buffer, the same object at every call."""
        return self._conv_states[self._check_layer(layer)]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero whole slots, which is the state of an empty sequence, in one operation on the current stream. The books do not change."""
        if slots:
            # By words of 8 bytes: the fill takes one element at a time.
            self.buffer.view(torch.int64).index_fill_(0, self._index(slots), 0)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Recount the books from scratch; see SlotLedger.check. Reads no slot, so it does not wait for the device."""
        self.ledger.check(held)

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.layout.num_layers:
            raise PoolError(f"layer {layer} is outside 0 to {self.layout.num_layers - 1}; count linear-attention layers only")
        return layer

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        """Slots as a device tensor, without waiting for the device."""
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise PoolError(f"slot {slot} is outside 0 to {self.num_slots - 1}; use slots of this pool")
        index = torch.tensor(slots, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return index.to(self.device, non_blocking=True)


def _make_buffer(layout: SlotLayout, num_slots: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty((num_slots, layout.slot_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch has one class for "no memory" on a GPU, and none on a CPU
        num_bytes = num_slots * layout.slot_bytes
        raise PoolError(
            f"{num_slots} slots of {layout.slot_bytes} bytes ({num_bytes} bytes) cannot be allocated on {device}; use fewer slots, a lower max_num_seqs"
        ) from error


def _align(num_bytes: int) -> int:
    return -(-num_bytes // FIELD_ALIGN_BYTES) * FIELD_ALIGN_BYTES
