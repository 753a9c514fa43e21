"""Everything that happens to pages, in order, and what of it breaks the contract of `atoll.offload.base`; knows no connector."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from atoll import LLM
from atoll.engine import runner
from atoll.engine.step import StateCopy, Step, StepRow
from atoll.offload.base import Transfer

WRITES = ("clear", "write", "save")


class Recorder:
    """`events` are pairs: clear, read, write, restore and save of a page, fence of a step, load and store of a page, told of a generation."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.faults: list[str] = []
        self._transfers: dict[int, tuple[Transfer, bool]] = {}  # leased
        self._fenced: set[int] = set()  # generations
        self._loading: dict[int, int] = {}  # page -> generation
        self._storing: Counter[int] = Counter()

    def check(self) -> None:
        assert not self.faults, self.faults[:5]

    def check_nothing_is_leased(self) -> None:
        self.check()
        assert not self._transfers and not self._loading and not +self._storing

    # Of transfers

    def leased(self, transfer: Transfer, is_load: bool) -> None:
        for page in transfer.pages:
            if is_load and (page in self._loading or self._storing[page]):
                self.faults.append(f"page {page} is the target of a load while another transfer uses it")
            if not is_load and page in self._loading:
                self.faults.append(f"page {page} is stored before it is loaded")
        self._transfers[transfer.generation] = transfer, is_load
        if is_load:
            self._loading |= dict.fromkeys(transfer.pages, transfer.generation)
        else:
            self._storing.update(transfer.pages)

    def fenced(self, number: int, transfers: Iterable[Transfer]) -> None:
        self.events.append(("fence", number))
        self._fenced.update(transfer.generation for transfer in transfers)

    def copied(self, generation: int, page: int) -> None:
        transfer, is_load = self._transfers.get(generation, (None, False))
        self.events.append(("load" if is_load else "store", page))
        if transfer is None:
            self.faults.append(f"page {page} is copied for generation {generation}, which has ended")
        if generation not in self._fenced:
            self.faults.append(f"page {page} is copied ahead of the fence")

    def told(self, generation: int, *, early: bool) -> None:
        self.events.append(("told", generation))
        if early:
            self.faults.append(f"generation {generation} is told before its copies")
        self.ended(generation)

    def ended(self, generation: int) -> None:
        transfer, is_load = self._transfers.pop(generation)
        for page in transfer.pages:
            if is_load:
                self._loading.pop(page, None)
            else:
                self._storing[page] -= 1

    # Of the compute stream

    def touched(self, kind: str, pages: Iterable[int]) -> None:
        for page in pages:
            self.events.append((kind, page))
            generation = self._loading.get(page)
            # A clear before the fence is what the fence is for.
            if generation is not None and (kind != "clear" or generation in self._fenced):
                self.faults.append(f"{kind} of page {page} while it is loaded")
            if kind in WRITES and self._storing[page] > 0:
                self.faults.append(f"{kind} of page {page} while it is stored")

    def ran(self, row: StepRow, page_size: int) -> None:
        """A row reads what is before it, and writes its own."""
        first = row.start // page_size
        self.touched("read", row.pages[: -(-row.start // page_size)])
        self.touched("write", row.pages[first:])

    def attach(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, run_rows = llm.engine.pool, llm.engine.runner._run_rows
        clear, restore, save = pool.clear, runner.restore_states, runner.save_states

        def cleared(pages: Sequence[int]) -> None:
            self.touched("clear", pages)
            clear(pages)

        def ran(step: Step) -> Any:
            for row in step.rows:
                self.ran(row, pool.layout.page_size)
            return run_rows(step)

        def restored(slots: Any, of_pool: Any, copies: Sequence[StateCopy]) -> None:
            self.touched("restore", [page for copy in copies for page in copy.pages] if of_pool is pool else ())
            restore(slots, of_pool, copies)

        def saved(slots: Any, of_pool: Any, copies: Sequence[StateCopy]) -> None:
            self.touched("save", [page for copy in copies for page in copy.pages] if of_pool is pool else ())
            save(slots, of_pool, copies)

        monkeypatch.setattr(pool, "clear", cleared)
        monkeypatch.setattr(llm.engine.runner, "_run_rows", ran)
        monkeypatch.setattr(runner, "restore_states", restored)
        monkeypatch.setattr(runner, "save_states", saved)
