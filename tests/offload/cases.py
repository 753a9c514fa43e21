"""Whole engines around tiny models with a slow connector, and what their answers must be."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, RequestOutput, SamplingParams
from atoll.models import LoadedModel, load_model
from tests.engine.tiny import CONFIG, ByteTokenizer, TinyLoaded, prompts, tiny_model
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder
from tests.offload.paces import Outcome, Pace, all_arrives, at_once
from tests.offload.slow import Slow

MIN_MARGIN = 5e-3  # natural log, between the two best tokens of the oracle: no choice hangs on a rounding
PAGE = 16  # tokens
GRID = 64  # tokens between the boundaries at which a tiny hybrid may leave a state


@cache
def load(name: str) -> Any:
    """The plain tiny model, or a hybrid."""
    if name == "llama":
        return TinyLoaded(tiny_model(), CONFIG, ByteTokenizer())
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), **CASES[name] | {"eos_token_id": None})
        loaded: LoadedModel = load_model(folder, device="cpu", dtype=torch.float32)
        return loaded


def make_llm(name: str, slow: Slow | None = None, **options: Any) -> LLM:
    """The guard on, an attention that leaks, and NaN wherever nobody has written."""
    guarded = {"attention_backend": "leaky", "guard": "on", "kv_fill": "nan"}
    sizes = {"kv_format": "fp32", "num_pages": 80, "max_num_seqs": 4, "max_model_len": 250, "max_num_batched_tokens": 256}
    return LLM.from_loaded(load(name), slow.offload if slow is not None else None, **guarded | sizes | options)


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def answers(name: str, work: Sequence[Sequence[int]], max_tokens: int = 6, kv_format: str = "fp32") -> list[list[int]]:
    """The oracle: each prompt alone, nothing reused."""
    return _answers(name, tuple(tuple(prompt) for prompt in work), max_tokens, kv_format)


@cache
def _answers(name: str, work: tuple[tuple[int, ...], ...], max_tokens: int, kv_format: str) -> list[list[int]]:
    llm = make_llm(name, attention_backend="auto", guard="off", kv_fill="zero", prefix_caching=False, max_num_seqs=1, kv_format=kv_format)
    outputs = [llm.generate([[*prompt]], greedy(max_tokens))[0] for prompt in work]
    margins = [entry.top[0][1] - entry.top[1][1] for output in outputs for entry in output.logprobs or ()]
    assert min(margins) > MIN_MARGIN, "a choice hangs on a rounding; take another prompt"
    return tokens(outputs)


def prompt(length: int, seed: int = 200) -> list[int]:
    """A random one; of one seed, the shorter are beginnings of the longer."""
    return prompts(2, seed=seed, longest=240)[1][:length]


def evict_all(llm: LLM, fill: str = "nan") -> int:
    """Everything that nobody holds leaves the pool, and is overwritten. Returns how many pages that were."""
    cache = llm.engine.scheduler.cache
    pages = cache.allocate(cache.num_available)
    llm.engine.pool.poison(pages, fill)  # type: ignore[arg-type]
    cache.release(pages)
    return len(pages)


def check_nothing_is_held(llm: LLM, slow: Slow) -> None:
    """No request, transfer or lease is left, and once the prefix cache is empty every page and slot is free."""
    engine = llm.engine
    assert not engine.has_work
    assert engine.drain_transfers(0.5)
    engine.check()
    slow.recorder.check_nothing_is_leased()
    assert not slow.worker.flights and not slow.connector.known
    evict_all(llm)
    assert engine.pool.ledger.num_free == engine.pool.num_pages - 1
    engine.pool.check(held=())
    if engine.slots is not None:
        engine.slots.check(held=())


@dataclass
class Bench:
    """An engine with a slow connector, all of whose touches of pages are recorded."""

    name: str
    monkeypatch: pytest.MonkeyPatch
    pace: Pace = at_once
    outcome: Outcome = all_arrives
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slow = Slow(self.pace, self.outcome)
        self.llm = make_llm(self.name, self.slow, **self.options)
        self.engine = self.llm.engine
        self.worker, self.connector, self.recorder = self.slow.worker, self.slow.connector, self.slow.recorder
        self.slow.watch(self.llm, self.monkeypatch)
        self.outputs: dict[int, RequestOutput] = {}

    def serve(self, prompt: list[int], max_tokens: int = 6, salt: str | None = None) -> RequestOutput:
        [output] = self.llm.generate([prompt], greedy(max_tokens), cache_salt=salt)
        return output

    def add(self, prompt: list[int], max_tokens: int = 6, salt: str | None = None) -> int:
        return self.engine.add(prompt, greedy(max_tokens), cache_salt=salt)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.outputs |= {piece.request_id: piece.output for piece in self.engine.step() if piece.output is not None}
            self.engine.check()

    def run(self, limit: int = 400) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no progress")

    def store(self, *work: list[int], max_tokens: int = 6) -> None:
        """Have prompts computed and stored, and then forgotten by the pool."""
        pace, self.worker.pace = self.worker.pace, at_once
        for prompt in work:
            self.serve(prompt, max_tokens)
        evict_all(self.llm)
        self.worker.pace = pace

    def store_again(self, prompt: list[int]) -> None:
        """Have the blobs of a prompt back that a load has lost, as they arrived once."""
        self.connector.index |= dict.fromkeys(self.worker.blobs)

    def check(self) -> None:
        self.recorder.check()
        check_nothing_is_held(self.llm, self.slow)
