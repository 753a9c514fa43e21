"""Turns a step into the tensors that a forward pass reads; knows no model and runs nothing."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from atoll.engine.step import Step, StepRow
from atoll.engine.transfer import empty_on_host, upload


@dataclass(frozen=True)
class PrefillSegment:
    """One chunk's place in the batch."""

    first: int  # its first token in the batch
    count: int  # tokens
    seq_len: int  # tokens of its sequence, the chunk included
    page_ids: torch.Tensor  # [pages of seq_len] int32, on the device
    state_slot: int | None = None  # None: the model keeps no state


@dataclass(frozen=True)
class Batch:
    """One step's tensors. Decode rows lie first: row `i` of `seq_lens` is token `i`."""

    num_decodes: int
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64; page * page_size + offset; -1: a padded row
    seq_lens: torch.Tensor  # [BP] int32 on the host; 0 for a padded row
    page_table: torch.Tensor  # [BP, MP] int32 on the host; the null page in every further lane
    segments: list[PrefillSegment]
    sample_rows: torch.Tensor  # [N] int64, the tokens whose successor is chosen


class BatchBuilder:
    """Makes each step's batch on the host and starts its copies to the device."""

    def __init__(self, device: torch.device, page_size: int, table_width: int) -> None:
        self.table_width = table_width  # MP: pages of the longest sequence
        self._device = device
        self._page_size = page_size

    def build(self, step: Step, num_padded: int, out: torch.Tensor | None = None) -> Batch:
        """The batch of `step`, its decode part padded to `num_padded` sequences.

        `out` [3, num_padded] int64 is where the tokens of a step without prefills go, for a captured graph to read them: they are padded too.
        """
        ints = empty_on_host((3, step.num_tokens if out is None else num_padded), torch.int64, self._device)
        self._fill_tokens(ints.numpy(), step)
        seq_lens = empty_on_host((num_padded,), torch.int32, self._device)
        page_table = empty_on_host((num_padded, self.table_width), torch.int32, self._device)
        self._fill_table(seq_lens.numpy(), page_table.numpy(), step.decodes)
        on_device = ints.to(self._device, non_blocking=True) if out is None else out.copy_(ints, non_blocking=True)
        return Batch(
            num_decodes=len(step.decodes),
            token_ids=on_device[0],
            positions=on_device[1],
            slots=on_device[2],
            seq_lens=seq_lens,
            page_table=page_table,
            segments=self._segments(step),
            sample_rows=upload(_sample_rows(step), torch.int64, self._device),
        )

    def state_slots(self, step: Step, num_padded: int) -> torch.Tensor:
        """The decode rows' slots for a model that keeps states: [num_padded] int32 on the host; -1 for a padded row."""
        slots = empty_on_host((num_padded,), torch.int32, self._device)
        ints = slots.numpy()
        ints[: len(step.decodes)] = [row.state_slot for row in step.decodes]
        ints[len(step.decodes) :] = -1
        return slots

    def _fill_tokens(self, ints: np.ndarray, step: Step) -> None:
        at = len(step.decodes)
        ints[0, at:] = 0
        ints[1, at:] = 0
        ints[2, at:] = -1
        if step.decodes:
            ints[0, :at] = [row.token_ids[0] for row in step.decodes]
            ints[1, :at] = [row.start for row in step.decodes]
            ints[2, :at] = [row.pages[row.start // self._page_size] * self._page_size + row.start % self._page_size for row in step.decodes]
        for row in step.prefills:
            end = at + len(row.token_ids)
            positions = np.arange(row.start, row.start + len(row.token_ids))
            ints[0, at:end] = row.token_ids
            ints[1, at:end] = positions
            ints[2, at:end] = np.asarray(row.pages, np.int64)[positions // self._page_size] * self._page_size + positions % self._page_size
            at = end

    def _fill_table(self, seq_lens: np.ndarray, page_table: np.ndarray, rows: list[StepRow]) -> None:
        seq_lens[len(rows) :] = 0
        seq_lens[: len(rows)] = [row.start + 1 for row in rows]
        page_table.fill(0)
        counts = np.array([len(row.pages) for row in rows], np.int64)
        # One pass over all pages: a loop of small copies costs more than the step's other host work at large batches.
        filled = np.arange(self.table_width) < counts[:, None]
        page_table[: len(rows)][filled] = np.fromiter(chain.from_iterable(row.pages for row in rows), np.int32, int(counts.sum()))

    def _segments(self, step: Step) -> list[PrefillSegment]:
        if not step.prefills:
            return []
        counts = [len(row.pages) for row in step.prefills]
        host = empty_on_host((sum(counts),), torch.int32, self._device)
        host.numpy()[:] = np.fromiter(chain.from_iterable(row.pages for row in step.prefills), np.int32, len(host))
        pages = host.to(self._device, non_blocking=True).split(counts)
        segments, first = [], len(step.decodes)
        for row, page_ids in zip(step.prefills, pages, strict=True):
            segments.append(PrefillSegment(first, len(row.token_ids), row.start + len(row.token_ids), page_ids, row.state_slot))
            first += len(row.token_ids)
        return segments


def _sample_rows(step: Step) -> list[int]:
    last = [*range(len(step.decodes))]
    end = len(step.decodes)
    for row in step.prefills:
        end += len(row.token_ids)
        last.append(end - 1)
    return [at for at, row in zip(last, step.rows, strict=True) if row.sample is not None]
