"""Reused prefixes give the tokens of a cold run: on hybrids and a plain model, in every KV format, through evictions, preemptions, aborts and poison.

The oracle is each prompt alone, whole, in a pool of zeros without prefix caching. It and what is compared with it round differently where a prompt is cut in
other places, so the prompts are such that no choice hangs on a rounding: the two best tokens are MIN_MARGIN apart at every step of the oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, RequestOutput, SamplingParams
from atoll.engine.reuse import PrefixReuse
from atoll.engine.runner import Runner
from atoll.engine.sampler import SampledToken
from atoll.engine.step import StateCopy, Step
from atoll.kv.prefix import PrefixCache
from atoll.models import LoadedModel, load_model
from tests.engine.tiny import check_nothing_is_held, make_llm, prompts
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

NUM_TOKENS = 18
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
MIN_MARGIN = 5e-3  # natural log
FORMATS = ["fp32", "bf16", "fp8_tensor", "fp8_token"]


@dataclass(frozen=True)
class Case:
    """A model, and prompts of which some share a beginning."""

    loaded: LoadedModel | None  # None: the plain tiny model
    work: list[list[int]]

    def llm(self, **options: Any) -> LLM:
        options = {"kv_format": "fp32", "kv_fill": "nan", "num_pages": 400, "max_num_seqs": 4, "max_model_len": 250, "max_num_batched_tokens": 256} | options
        return make_llm(**options) if self.loaded is None else LLM.from_loaded(self.loaded, **options)

    def cold(self, kv_format: str) -> list[list[int]]:
        """The oracle."""
        llm = self.llm(kv_format=kv_format, kv_fill="zero", prefix_caching=False, max_num_seqs=1)
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in self.work]
        margins = [entry.top[0][1] - entry.top[1][1] for output in outputs for entry in output.logprobs or ()]
        assert min(margins) > MIN_MARGIN, "a choice hangs on a rounding; take another prompt"
        assert len({tuple(output.token_ids) for output in outputs}) == len(outputs)
        return [output.token_ids for output in outputs]


def shared_prompts() -> list[list[int]]:
    own = prompts(8, seed=130, longest=60)
    base = prompts(2, seed=131, longest=130)[1]
    return [base[:100] + own[0], base + own[2], base[:100] + own[3], own[4], base[:70] + own[5], base + own[6]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("qwen3_5", "qwen3_next")}
    for name, folder in found.items():
        make_folder(folder, **CASES[name] | {"eos_token_id": None})
    return found


@pytest.fixture(scope="module")
def cases(folders: dict[str, Path]) -> dict[str, Case]:
    loaded = {name: load_model(str(folder), device="cpu", dtype=torch.float32) for name, folder in folders.items()}
    return {"llama": Case(None, shared_prompts())} | {name: Case(one, shared_prompts()) for name, one in loaded.items()}


@pytest.fixture(scope="module", params=[*(("qwen3_5", f) for f in FORMATS), ("qwen3_next", "fp32"), ("llama", "fp32"), ("llama", "fp8_token")], ids="-".join)
def cold(request: pytest.FixtureRequest, cases: dict[str, Case]) -> tuple[Case, str, list[list[int]]]:
    name, kv_format = request.param
    return cases[name], kv_format, cases[name].cold(kv_format)


Cold = tuple[Case, str, list[list[int]]]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_warm_equals_cold(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format, max_num_seqs=1)
    first, again = (llm.generate(case.work, GREEDY) for _ in range(2))
    assert tokens(first) == wanted == tokens(again)
    # All but the last chunk of 64, whatever the length.
    assert all(len(output.prompt_token_ids) - output.num_cached_tokens <= 64 for output in again)
    assert sum(output.num_cached_tokens for output in first) > 100
    check_nothing_is_held(llm)


def test_warm_in_a_crowd_and_in_chunks_equals_cold_alone(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format, max_num_seqs=6, max_num_batched_tokens=72)
    assert [tokens(llm.generate(case.work, GREEDY)) for _ in range(2)] == [wanted] * 2
    assert llm.engine.prefix_stats.num_hits > 500
    check_nothing_is_held(llm)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 3000), (4, 1000), (64, 60)])
def test_every_page_size_gives_the_same_tokens(cases: dict[str, Case], page_size: int, num_pages: int) -> None:
    case = cases["qwen3_5"]
    llm = case.llm(page_size=page_size, num_pages=num_pages)
    wanted = case.cold("fp32")
    assert [tokens(llm.generate(case.work, GREEDY)) for _ in range(2)] == [wanted] * 2
    assert llm.engine.prefix_stats.num_hits > 500
    check_nothing_is_held(llm)


def test_the_next_turn_equals_a_cold_one(cold: Cold) -> None:
    """A request that begins with another's prompt and answer goes on as if that answer had gone on."""
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format)
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = llm.generate(case.work, short)
    turns = llm.generate([output.prompt_token_ids + output.token_ids for output in answers], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert [a.token_ids + b.token_ids for a, b in zip(answers, turns, strict=True)] == wanted
    assert sum(turn.num_cached_tokens for turn in turns) > 400
    check_nothing_is_held(llm)


def test_a_pool_that_evicts_equals_a_large_one(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format, num_pages=26)
    for _ in range(3):
        assert tokens(llm.generate(case.work, GREEDY)) == wanted
        llm.engine.check()
    stats = llm.engine.prefix_stats
    assert stats.num_evicted_pages > 0 and stats.num_hits > 0
    assert not llm.engine.slots or stats.num_evicted_checkpoints > 0
    check_nothing_is_held(llm)


def run_with_preemptions(llm: LLM, work: list[list[int]]) -> list[list[int]]:
    """Every third step the latest request loses its place, while its prefix is still there."""
    engine = llm.engine
    for index, prompt in enumerate(work):
        engine.add(prompt, GREEDY, index=index)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_work:
        outputs |= {piece.index: piece.output for piece in engine.step() if piece.output}
        if engine.num_steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt_latest()
            engine.check()
    assert sum(output.num_preemptions for output in outputs.values()) > 10
    return [outputs[index].token_ids for index in range(len(work))]


def test_resumed_equals_never_preempted(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format)
    assert run_with_preemptions(llm, case.work) == wanted
    assert llm.engine.prefix_stats.num_resumed > 200
    check_nothing_is_held(llm)


def test_preempted_for_want_of_pages_equals_undisturbed(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format, num_pages=22, max_num_seqs=6)
    outputs = [output for _ in range(2) for output in llm.generate(case.work, GREEDY)]
    assert tokens(outputs) == wanted * 2
    assert sum(output.num_preemptions for output in outputs) > 0
    check_nothing_is_held(llm)


def test_aborts_at_every_step_disturb_nobody(cold: Cold) -> None:
    case, kv_format, wanted = cold
    llm = case.llm(kv_format=kv_format, num_pages=40, max_num_batched_tokens=72)
    for count in range(1, 20, 3):
        ids = [llm.engine.add(prompt, GREEDY) for prompt in case.work]
        for _ in range(count):
            llm.engine.step()
        llm.engine.abort(ids[count % len(ids)])
        llm.engine.check()
        llm.engine.step()
        llm.engine.abort_all()
        llm.engine.check()
    assert tokens(llm.generate(case.work, GREEDY)) == wanted
    assert llm.engine.prefix_stats.num_hits > 0
    check_nothing_is_held(llm)


# Negative controls: each brings one fault back, and the equality of warm and cold must fail.


def published_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    execute, late = Runner.execute, list[StateCopy]()

    def deferred(self: Runner, step: Step) -> dict[int, SampledToken]:
        due = list(late)
        late[:], step.saves[:] = step.saves, due
        return execute(self, step)

    patch.setattr(Runner, "execute", deferred)


def one_page_late(patch: pytest.MonkeyPatch) -> None:
    reserve = PrefixCache.reserve
    patch.setattr(PrefixCache, "reserve", lambda self, digests: reserve(self, digests[:-1] or digests))


def restored_into_the_wrong_slot(patch: pytest.MonkeyPatch) -> None:
    admit = PrefixReuse.admit

    def neighbour(self: PrefixReuse, request: Any, step: Step) -> None:
        known = len(step.restores)
        admit(self, request, step)
        step.restores[known:] = [StateCopy((copy.state_slot + 1) % 4, copy.pages) for copy in step.restores[known:]]

    patch.setattr(PrefixReuse, "admit", neighbour)


def never_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("atoll.engine.runner.restore_states", lambda slots, pool, copies: None)


@pytest.mark.parametrize("fault", [published_before_its_copy, one_page_late, restored_into_the_wrong_slot, never_restored], ids=lambda fault: fault.__name__)
def test_control_a_wrong_state_shows(cases: dict[str, Case], fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_5"]
    wanted = case.cold("fp32")
    fault(monkeypatch)
    llm = case.llm()
    assert [tokens(llm.generate(case.work, GREEDY)) for _ in range(2)] != [wanted] * 2
