"""The tensors of one step, checked against the plain meaning of each: token, position, slot, table row, sampled row."""

import pytest
import torch

from atoll.engine.batch import BatchBuilder
from atoll.engine.runner import padded_batch_size
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import SampleTask, Step, StepRow

CPU = torch.device("cpu")
SAMPLE = SampleTask(SamplingParams(), 0, 0)

STEP = Step(
    decodes=[StepRow(0, 5, [50], [7, 3], SAMPLE), StepRow(1, 0, [60], [9], None)],
    prefills=[StepRow(2, 8, [70, 71, 72], [1, 2, 8], SAMPLE), StepRow(3, 0, [80, 81], [4], None)],
)


def test_a_mixed_step() -> None:
    batch = BatchBuilder(CPU, page_size=4, table_width=5).build(STEP, num_padded=2)
    assert batch.token_ids.tolist() == [50, 60, 70, 71, 72, 80, 81]
    assert batch.positions.tolist() == [5, 0, 8, 9, 10, 0, 1]
    assert batch.slots.tolist() == [3 * 4 + 1, 9 * 4, 8 * 4, 8 * 4 + 1, 8 * 4 + 2, 4 * 4, 4 * 4 + 1]
    assert batch.seq_lens.tolist() == [6, 1]
    assert batch.page_table.tolist() == [[7, 3, 0, 0, 0], [9, 0, 0, 0, 0]]
    assert [(s.first, s.count, s.seq_len, s.page_ids.tolist()) for s in batch.segments] == [(2, 3, 11, [1, 2, 8]), (5, 2, 2, [4])]
    # The second decode row and the last chunk do not reach their sequence's end.
    assert batch.sample_rows.tolist() == [0, 4]


def test_a_padded_decode_step_writes_nothing_and_names_the_null_page() -> None:
    out = torch.full((3, 4), 99)
    batch = BatchBuilder(CPU, page_size=4, table_width=3).build(Step(decodes=STEP.decodes), num_padded=4, out=out)
    assert batch.token_ids.data_ptr() == out.data_ptr()
    assert out.tolist() == [[50, 60, 0, 0], [5, 0, 0, 0], [13, 36, -1, -1]]
    assert batch.seq_lens.tolist() == [6, 1, 0, 0]
    assert batch.page_table.tolist() == [[7, 3, 0], [9, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_state_slots_name_none_for_padded_rows() -> None:
    rows = [StepRow(0, 5, [50], [7, 3], SAMPLE, state_slot=6), StepRow(1, 0, [60], [9], None, state_slot=0)]
    slots = BatchBuilder(CPU, page_size=4, table_width=3).state_slots(Step(decodes=rows), num_padded=4)
    assert slots.dtype == torch.int32 and slots.tolist() == [6, 0, -1, -1]


def test_a_chunk_carries_its_state_slot() -> None:
    rows = [StepRow(2, 8, [70, 71, 72], [1, 2, 8], SAMPLE, state_slot=5), StepRow(3, 0, [80, 81], [4], None)]
    batch = BatchBuilder(CPU, page_size=4, table_width=5).build(Step(prefills=rows), num_padded=0)
    assert [segment.state_slot for segment in batch.segments] == [5, None]


def test_slots_of_large_pools_are_64_bit() -> None:
    page = 2**31 - 1
    batch = BatchBuilder(CPU, page_size=1024, table_width=1).build(Step(decodes=[StepRow(0, 3, [1], [page], SAMPLE)]), num_padded=1)
    assert batch.slots.tolist() == [page * 1024 + 3]


@pytest.mark.parametrize(("num_decodes", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24), (59, 60)])
def test_padded_sizes(num_decodes: int, padded: int) -> None:
    assert padded_batch_size(num_decodes, max_num_seqs=60) == padded
