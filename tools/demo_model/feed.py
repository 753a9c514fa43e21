"""Token rows made by worker processes while the model trains: documents packed one behind the other, each row beginning with a new document."""

import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.demo_model.documents import draw_document

# The top bit of a stored token: to be learnt in full. Ids are far below it.
ANSWER_BIT = 1 << 15
END_OF_TEXT = 0
# Documents tokenized at a time, and rows made at a time.
BATCH, CHUNK = 256, 32


def pack_rows(tokenizer: Tokenizer, rng: random.Random, count: int, width: int) -> np.ndarray:
    """uint16 `[count, width]`: token ids, ANSWER_BIT set where the model is to speak. Of a row's last document only the part that fits is used."""
    rows = np.empty((count, width), dtype=np.uint16)
    filled, tokens = 0, []
    while filled < count:
        documents = [draw_document(rng) for _ in range(BATCH)]
        texts = [segment.text for document in documents for segment in document]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document in documents:
            for segment in document:
                ids = next(encoded).ids
                tokens += [i | ANSWER_BIT for i in ids] if segment.is_answer else ids
            tokens.append(END_OF_TEXT | ANSWER_BIT)
            if len(tokens) >= width:
                rows[filled] = tokens[:width]
                filled, tokens = filled + 1, []
                if filled == count:
                    break
    return rows


class Feed:
    """A ring of rows in a mapped file. A batch is drawn from rows not used yet; where the workers lag behind, rows come round again."""

    def __init__(self, tokenizer_file: Path, *, width: int, capacity: int, num_workers: int, seed: int) -> None:
        self.num_workers = num_workers
        self._file = tempfile.NamedTemporaryFile(prefix="rows-")  # noqa: SIM115
        shape = (num_workers, max(capacity // num_workers, CHUNK), width)
        self.rows = np.memmap(self._file.name, dtype=np.uint16, mode="w+", shape=shape)
        # Workers are started anew, not forked: torch's threads and CUDA do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._made = [context.Value("q", 0, lock=False) for _ in range(num_workers)]
        self._used = [context.Value("q", 0, lock=False) for _ in range(num_workers)]
        self.num_repeated = 0  # rows handed out again
        self._next = 0
        self._workers = [
            context.Process(target=_work, args=(str(tokenizer_file), self._file.name, shape, i, self._made[i], self._used[i], seed), daemon=True)
            for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def num_made(self) -> int:
        return sum(value.value for value in self._made)

    def wait(self, count: int, limit_s: float = 120.0) -> None:
        """Until so many rows are there, and some of each worker. Raises RuntimeError when the workers do not deliver."""
        end = time.monotonic() + limit_s
        while self.num_made < count or not all(value.value for value in self._made):
            if time.monotonic() > end or not all(worker.is_alive() for worker in self._workers):
                raise RuntimeError(f"the workers made {self.num_made} rows of {count} in {limit_s} s")
            time.sleep(0.05)

    def batch(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Fill `out` `[B, width]`, from the workers in turn."""
        share = self.rows.shape[1]
        for i in range(len(out)):
            for _ in range(self.num_workers):
                w = self._next
                self._next = (self._next + 1) % self.num_workers
                if self._used[w].value < self._made[w].value:
                    break
            used, made = self._used[w].value, self._made[w].value
            if used < made:
                out[i] = self.rows[w, used % share]
                self._used[w].value += 1
            else:
                # Possibly a row that is being replaced: two halves of documents, for once, do no harm.
                out[i] = self.rows[w, int(rng.integers(0, min(made, share)))]
                self.num_repeated += 1

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join(timeout=5)
        self._file.close()


def _work(tokenizer_file: str, rows_file: str, shape: tuple[int, int, int], index: int, made: Any, used: Any, seed: int) -> None:
    rows = np.memmap(rows_file, dtype=np.uint16, mode="r+", shape=shape)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = random.Random(f"{seed}:{index}")
    _, share, width = shape
    while True:
        for row in pack_rows(tokenizer, rng, CHUNK, width):
            while made.value - used.value >= share:
                time.sleep(0.01)
            rows[index, made.value % share] = row
            made.value += 1
