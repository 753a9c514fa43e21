"""State slots: where fields lie, what fills and clears touch, and that every line of the books' check has been seen to fail."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError, OutOfSlotsError, PoolCorruptError, PoolError, SpecError
from atoll.kv import FILLS, SlotLayout, SlotLedger, SlotPool
from atoll.kv.fills import Fill
from atoll.ops.delta import DeltaSpec, delta_prefill, delta_recurrent, delta_step
from atoll.ops.delta.reference import conv_heads
from atoll.ops.delta.spec import DTYPES

SPEC = DeltaSpec(2, 4, 8, 12, conv_width=4, dtype=torch.bfloat16)


def make_pool(fill: Fill = "zero", *, num_slots: int = 5, spec: DeltaSpec = SPEC, seed: int = 0) -> SlotPool:
    return SlotPool(SlotLayout(3, spec), num_slots, "cpu", fill, seed=seed)


def fields(pool: SlotPool) -> list[torch.Tensor]:
    return [view(layer) for layer in range(pool.layout.num_layers) for view in (pool.states, pool.conv_states)]


# The layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 7])
def test_fields_have_their_shapes_and_lie_in_the_buffer(dtype: torch.dtype, width: int) -> None:
    pool = make_pool(spec=DeltaSpec(2, 4, 8, 12, conv_width=width, dtype=dtype))
    for layer in range(3):
        assert pool.states(layer).shape == (5, 4, 8, 12) and pool.states(layer).dtype == torch.float32
        assert pool.conv_states(layer).shape == (5, 2 * 16 + 48, width - 1) and pool.conv_states(layer).dtype == dtype
    for field in fields(pool):
        assert field.untyped_storage().data_ptr() == pool.buffer.untyped_storage().data_ptr()
        assert field.stride(0) * field.itemsize == pool.layout.slot_bytes
        assert field[0].is_contiguous() and (field.data_ptr() - pool.buffer.data_ptr()) % 128 == 0
    assert pool.layout.slot_bytes % 128 == 0 and pool.num_bytes == 5 * pool.layout.slot_bytes == pool.buffer.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_two_fields_share_a_byte(dtype: torch.dtype) -> None:
    pool = make_pool(spec=DeltaSpec(1, 3, 5, 7, conv_width=3, dtype=dtype))
    marks = torch.zeros_like(pool.buffer, dtype=torch.int32)
    num_bytes = 0
    for field in fields(pool):
        pool.buffer.zero_()
        field.view(torch.uint8).fill_(1)
        marks += pool.buffer
        num_bytes += field.numel() * field.itemsize
    assert marks.max() == 1 and int(marks.sum()) == num_bytes


def test_the_slot_of_a_published_model() -> None:
    # Qwen3.5-35B-A3B: 30 of 40 layers, 16 key and 32 value heads of 128; 2 MiB of state and 48 KiB of conv inputs for each.
    layout = SlotLayout(30, DeltaSpec(16, 32, 128, 128, dtype=torch.bfloat16))
    assert (layout.state_bytes, layout.conv_state_bytes) == (32 * 128 * 128 * 4, 8192 * 3 * 2)
    assert layout.slot_bytes == 30 * (2 * 2**20 + 48 * 2**10)


def test_offsets_are_64_bit_in_a_pool_of_many_gibibytes() -> None:
    layout = SlotLayout(30, DeltaSpec(16, 32, 128, 128, dtype=torch.bfloat16))
    buffer = torch.empty((256, layout.slot_bytes), dtype=torch.uint8, device="meta")
    assert buffer.numel() > 2**33
    last = layout.conv_states(buffer, 29)[255]
    assert last.storage_offset() * last.itemsize == 255 * layout.slot_bytes + layout.conv_state_offset(29)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there(layer: int) -> None:
    pool = make_pool()
    for view in (pool.states, pool.conv_states):
        with pytest.raises(PoolError, match=f"layer {layer} is outside 0 to 2; count linear-attention layers only"):
            view(layer)
    with pytest.raises(SpecError, match=f"layer {layer} is outside 0 to 2"):
        pool.layout.states(pool.buffer, layer)


def test_what_has_no_state_has_no_layout() -> None:
    with pytest.raises(SpecError, match="num_layers 0 is below 1; give the model's count of linear-attention layers"):
        SlotLayout(0, SPEC)


@pytest.mark.parametrize("change", [lambda b: b[:, :-1], lambda b: b.float(), lambda b: b[0], lambda b: b.t().contiguous().t()])
def test_a_buffer_that_does_not_fit(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pool = make_pool()
    with pytest.raises(SpecError, match=rf"the layout asks for contiguous torch.uint8 of shape \[R, {pool.layout.slot_bytes}\]"):
        pool.layout.states(change(pool.buffer), 0)


# Fills and clears


@pytest.mark.parametrize(("fill", "holds"), [("zero", lambda x: x == 0), ("nan", torch.isnan), ("inf", torch.isposinf), ("max", lambda x: x == math.inf)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fills_decode_as_they_claim_in_every_field(dtype: torch.dtype, fill: Fill, holds: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pool = make_pool(fill, spec=DeltaSpec(2, 4, 8, 12, dtype=dtype))
    for field in fields(pool):
        values = torch.where(field == torch.finfo(field.dtype).max, math.inf, field) if fill == "max" else field
        assert bool(holds(values).all())


def test_random_fills_repeat_by_seed() -> None:
    assert torch.equal(make_pool("random", seed=1).buffer, make_pool("random", seed=1).buffer)
    assert not torch.equal(make_pool("random", seed=1).buffer, make_pool("random", seed=2).buffer)


def test_an_unknown_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match="fill 'ones' is unknown; use one of zero, nan"):
        make_pool("ones")  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", FILLS)
def test_a_cleared_slot_is_zero_and_its_neighbours_are_as_they_were(fill: Fill) -> None:
    pool = make_pool(fill)
    before = pool.buffer.clone()
    pool.clear([])
    assert torch.equal(pool.buffer, before)
    pool.clear([3, 1])
    before[[1, 3]] = 0
    assert torch.equal(pool.buffer, before)
    assert all(bool((field[[1, 3]] == 0).all()) for field in fields(pool))


@pytest.mark.parametrize("slot", [-1, 5])
def test_a_slot_that_is_not_there_is_not_cleared(slot: int) -> None:
    pool = make_pool("nan")
    with pytest.raises(PoolError, match=f"slot {slot} is outside 0 to 4; use slots of this pool"):
        pool.clear([0, slot])
    assert bool((pool.buffer == 0xFF).all())


def test_more_slots_than_memory() -> None:
    layout = SlotLayout(60, DeltaSpec(16, 256, 256, 256))
    with pytest.raises(PoolError, match=r"slots of \d+ bytes \(\d+ bytes\) cannot be allocated on cpu; use fewer slots, a lower max_num_seqs"):
        SlotPool(layout, 2**24, "cpu")


def test_the_delta_rule_runs_in_the_slots_of_a_poisoned_pool() -> None:
    """Prefill, then a step, in a cleared slot: what the definition gives from zeros, and every other slot keeps its bytes."""
    spec = DeltaSpec(2, 4, 8, 12, dtype=torch.float32)
    pool = make_pool("nan", spec=spec)
    generator = torch.Generator().manual_seed(0)
    mixed, weight = torch.randn(9, spec.conv_dim, generator=generator), torch.randn(spec.conv_dim, 4, generator=generator)
    g, beta = -torch.rand(9, 4, generator=generator), torch.rand(9, 4, generator=generator)
    q, k, v, _ = conv_heads(spec, mixed, weight, torch.zeros(spec.conv_state_shape))
    wanted, state = delta_recurrent(q, k, v, g, beta, torch.zeros(spec.state_shape))
    pool.clear([2])
    own = (spec, mixed[:8], g[:8], beta[:8], weight, pool.conv_states(1), pool.states(1))
    first = delta_prefill(*own, 2, resume=True)
    slots = torch.tensor([-1, 2], dtype=torch.int32)
    rows = [x[8].expand(2, 1, -1) for x in (mixed, g, beta)]
    last = delta_step(spec, *rows, weight, pool.conv_states(1), pool.states(1), slots)
    assert torch.allclose(torch.cat([first, last[1]]), wanted, atol=1e-5)
    assert torch.allclose(pool.states(1)[2], state, atol=1e-5) and not last[0].any()
    assert bool((pool.buffer[[0, 1, 3, 4]] == 0xFF).all())
    assert not pool.states(0)[2].any() and not pool.conv_states(2)[2].any()


# The books


@pytest.mark.parametrize("num_slots", [0, -3, 2**31 + 1])
def test_a_bad_number_of_slots(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=f"num_slots {num_slots} is outside 1 to {2**31}; give one for each sequence"):
        SlotLedger(num_slots)


def test_slots_live_from_allocate_to_release() -> None:
    ledger = SlotLedger(3)
    ledger.check(held=[])
    assert [ledger.allocate() for _ in range(3)] == [0, 1, 2] and ledger.num_free == 0
    with pytest.raises(OutOfSlotsError, match="a slot was asked for, 0 of 3 are free; finish or preempt a sequence"):
        ledger.allocate()
    ledger.release(1)
    assert not ledger.is_held(1) and ledger.is_held(2)
    ledger.check(held=[0, 2])
    assert ledger.allocate() == 1


def test_a_release_that_cannot_be_right_changes_nothing() -> None:
    ledger = SlotLedger(2)
    slot = ledger.allocate()
    with pytest.raises(PoolError, match="slot 1 is free and cannot be released; it was given back before"):
        ledger.release(1)
    for outside in (-1, 2):
        with pytest.raises(PoolError, match=f"slot {outside} is outside 0 to 1; use slots that allocate returned"):
            ledger.release(outside)
    ledger.check(held=[slot])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=80))
def test_random_traffic_against_a_set(moves: list[int]) -> None:
    ledger, held = SlotLedger(4), set[int]()
    for move in moves:
        if move < 4 and move in held:
            ledger.release(move)
            held.remove(move)
        elif move >= 4 and len(held) < 4:
            slot = ledger.allocate()
            assert slot not in held
            held.add(slot)
        ledger.check(held=held)
        assert ledger.num_free == 4 - len(held)


def freed_twice(ledger: SlotLedger) -> None:
    ledger._free.append(3)


def foreign(ledger: SlotLedger) -> None:
    ledger._free.append(4)


def freed_while_held(ledger: SlotLedger) -> None:
    ledger._free.append(0)


def neither(ledger: SlotLedger) -> None:
    ledger._free.remove(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (freed_twice, "slot 3 is 2 times on the free list"),
        (foreign, "slot 4 is on the free list, which may hold 0 to 3"),
        (freed_while_held, "slot 0 is held and on the free list"),
        (neither, "slot 3 is not held and off the free list"),
    ],
)
def test_damaged_books_are_found(damage: Callable[[SlotLedger], None], message: str) -> None:
    ledger = SlotLedger(4)
    ledger.allocate()
    ledger.check(held=[0])
    damage(ledger)
    with pytest.raises(PoolCorruptError, match=message):
        ledger.check()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "slot 0 is held in the books and has 0 holders; it was lost without a release"),
        ([0, 1], "slot 1 is free in the books and has 1 holders; it was released behind its holder's back"),
        ([0, 0], "slot 0 has 2 holders, once is the limit; two sequences write one state"),
    ],
)
def test_holders_that_disagree_with_the_books_are_found(held: list[int], message: str) -> None:
    ledger = SlotLedger(4)
    ledger.allocate()
    with pytest.raises(PoolCorruptError, match=message):
        ledger.check(held=held)
