"""Whole engines with LMCache behind them: what was fetched from it is as what never left the pool, token for token."""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, RequestOutput, SamplingParams
from atoll.models import load_model
from atoll.offload.base import Metadata, Transfer
from atoll.offload.base_worker import Fence
from atoll.offload.lmcache import LMCacheConnector
from atoll.offload.lmcache_worker import LMCacheWorker, _Loads
from tests.engine.conftest import one_thread
from tests.engine.tiny import CONFIG, ByteTokenizer, TinyLoaded, prompts, tiny_model
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder
from tests.offload.lmcache.pool import write_config

__all__ = ["one_thread"]

MODELS = ["llama", "qwen3_5"]
SIZES = {"kv_format": "fp32", "num_pages": 80, "max_num_seqs": 4, "max_model_len": 250, "max_num_batched_tokens": 256}
# An attention that leaks and the guard that it needs: a page that is cleared too late, or not written, shows.
GUARDED = {"attention_backend": "leaky", "guard": "on", "kv_fill": "nan"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Shared beginnings, and lengths around the pages' and the states' boundaries.
WORK = [prompts(2, seed=seed, longest=230)[1][:length] for seed, length in ((1, 230), (1, 129), (1, 128), (2, 200), (3, 65), (4, 40))]


@cache
def load(name: str) -> Any:
    if name == "llama":
        return TinyLoaded(tiny_model(), CONFIG, ByteTokenizer())
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), **CASES[name] | {"eos_token_id": None})
        return load_model(folder, device="cpu", dtype=torch.float32)


@cache
def alone(name: str) -> list[list[int]]:
    """The oracle: each prompt by itself, nothing reused."""
    llm = LLM.from_loaded(load(name), **SIZES | {"prefix_caching": False})
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in WORK]


class Served:
    """An engine with LMCache, and what became of its requests."""

    def __init__(self, name: str, config: str, **options: Any) -> None:
        self.llm = LLM.from_loaded(load(name), **SIZES | GUARDED | options | {"offload": f"lmcache:{config}"})
        assert self.llm.engine.offload is not None
        connector, worker = self.llm.engine.offload
        assert isinstance(connector, LMCacheConnector) and isinstance(worker, LMCacheWorker)
        self.connector, self.worker = connector, worker

    def serve(self) -> list[RequestOutput]:
        return self.llm.generate(WORK, GREEDY)

    def evict_all(self) -> None:
        """Everything leaves the pool, and is overwritten."""
        cache = self.llm.engine.scheduler.cache
        pages = cache.allocate(cache.num_available)
        self.llm.engine.pool.poison(pages, "nan")
        cache.release(pages)

    def check(self) -> None:
        """No request, transfer or lease is left, and LMCache may evict all that it has."""
        engine = self.llm.engine
        assert not engine.has_work and engine.drain_transfers(10.0)
        engine.check()
        self.evict_all()
        assert engine.pool.ledger.num_free == engine.pool.num_pages - 1
        engine.pool.check(held=())
        assert not self.connector.has_pending_work
        assert all(memory.can_evict for memory in self.connector._store._cpu.hot_cache.values())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(name: str, cpu_bytes: int = 2**24, disk_bytes: int = 0, **options: Any) -> Served:
        made.append(Served(name, write_config(tmp_path, cpu_bytes, disk_bytes), **options))
        return made[-1]

    yield make
    for one in made:
        one.llm.close()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("disk_bytes", [pytest.param(0, id="memory"), pytest.param(2**26, id="disk")])
def test_fetched_is_resident(served: Callable[..., Served], name: str, disk_bytes: int) -> None:
    """Stored by the first pass, gone from the pool, fetched by the second; the disk's run has LMCache's memory hold a part only."""
    one = served(name, 2**24 if not disk_bytes else 2**19, disk_bytes)
    first = one.serve()
    assert tokens(first) == alone(name) and not sum(output.num_fetched_tokens for output in first)
    one.evict_all()
    second = one.serve()
    assert tokens(second) == alone(name)
    fetched = sum(output.num_fetched_tokens for output in second)
    # A hybrid resumes where it left a state: at its prompt's last boundary.
    assert fetched >= 0.7 * sum(len(prompt) for prompt in WORK), fetched
    stats = one.connector.stats
    assert stats.num_load_failures == stats.num_store_failures == 0 and stats.loaded_bytes > 0 and stats.stored_bytes > 0
    one.check()


@pytest.mark.parametrize("name", MODELS)
def test_control_pages_that_are_not_written_show(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Loads that claim to have arrived and copied nothing."""
    one = served(name)
    assert tokens(one.serve()) == alone(name)
    one.evict_all()
    monkeypatch.setattr(_Loads, "_copies", lambda *_: iter(()))
    assert tokens(one.serve()) != alone(name)


@pytest.mark.parametrize("name", MODELS)
def test_what_lmcache_evicts_under_a_load_is_computed(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of each load that the engine has begun, LMCache drops the last blob before it is read: the last page, or the state."""
    one = served(name)
    assert tokens(one.serve()) == alone(name)
    one.evict_all()
    take_on = one.connector.after_allocation

    def take_on_and_lose(load: Transfer) -> bool:
        taken = take_on(load)
        last = load.spans[-1]
        one.connector._store._manager.remove(one.connector._store.key(last.kind, last.digest, 0))
        return taken

    monkeypatch.setattr(one.connector, "after_allocation", take_on_and_lose)
    second = one.serve()
    assert tokens(second) == alone(name)
    assert one.connector.stats.num_load_failures > 0
    # Whatever was computed instead has been stored anew.
    monkeypatch.undo()
    one.evict_all()
    third = one.serve()
    assert tokens(third) == alone(name) and sum(o.num_fetched_tokens for o in third) >= sum(o.num_fetched_tokens for o in second)
    one.check()


def test_an_lmcache_that_is_too_small_gives_what_it_has(served: Callable[..., Served]) -> None:
    """It evicts while the engine looks up, loads and stores."""
    name = "qwen3_5"
    one = served(name, 24 * 8 * 2**10)
    for _ in range(3):
        assert tokens(one.serve()) == alone(name)
        one.evict_all()
    assert one.connector.stats.tiers[0].num_evicted > 0
    one.check()


def test_aborts_at_any_step_leave_nothing_held(served: Callable[..., Served]) -> None:
    name = "qwen3_5"
    one = served(name)
    assert tokens(one.serve()) == alone(name)
    engine = one.llm.engine
    for num_steps in range(6):
        one.evict_all()
        for index, prompt in enumerate(WORK):
            engine.add(prompt, GREEDY, index=index)
        for _ in range(num_steps):
            engine.step()
        engine.abort_all()
        assert engine.drain_transfers(10.0)
        engine.check()
    assert tokens(one.serve()) == alone(name)
    one.check()


def test_a_dead_thread_costs_what_it_would_have_brought(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    one = served("qwen3_5")
    assert tokens(one.serve()) == alone("qwen3_5")
    one.evict_all()
    run = one.worker.run

    def run_and_stop(metadata: Metadata, fence: Fence) -> None:
        one.worker._loads.stop()
        one.worker._loads.join(5.0)
        run(metadata, fence)

    monkeypatch.setattr(one.worker, "run", run_and_stop)
    second = one.serve()
    assert tokens(second) == alone("qwen3_5") and not sum(output.num_fetched_tokens for output in second)
    one.check()
