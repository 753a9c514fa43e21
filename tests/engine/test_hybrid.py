"""Hybrid models end to end: greedy tokens are transformers', however a request is batched, cut, preempted or placed; and every slot comes back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.config import SchedulerConfig
from atoll.engine import delta as engine_delta
from atoll.engine.batch import BatchBuilder
from atoll.engine.request import Request
from atoll.engine.scheduler import Scheduler
from atoll.engine.step import Step
from atoll.errors import ConfigError, PoolCorruptError, RequestError
from atoll.kv import FILLS, SlotLedger, SlotPool
from atoll.models import LoadedModel, load_model
from tests.engine.tiny import check_nothing_is_held, make_llm, prompts
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

NUM_TOKENS = 20
# One token, several of the delta rule's chunks of 64, and lengths between.
PROMPTS = prompts(6, longest=200)
SHORT = prompts(6, seed=1, longest=40)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    wanted: list[list[int]]  # what transformers generates after each of PROMPTS
    wanted_short: list[list[int]]  # and after each of SHORT

    def llm(self, **options: Any) -> LLM:
        return LLM.from_loaded(self.loaded, **{"kv_format": "fp32", "num_pages": 64, "max_num_seqs": 4, "max_model_len": 256} | options)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_folder(folder, **CASES[request.param] | {"eos_token_id": None})
    loaded = load_model(str(folder), device="cpu", dtype=torch.float32)
    return Case(loaded, *([generated(oracle, prompt) for prompt in many] for many in (PROMPTS, SHORT)))


def generated(oracle: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def tokens(llm: LLM, token_prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(token_prompts, GREEDY)]


def slots_of(llm: LLM) -> SlotPool:
    assert llm.engine.slots is not None
    return llm.engine.slots


def test_the_oracle_is_not_trivial(case: Case) -> None:
    for wanted in (case.wanted, case.wanted_short):
        assert len({tuple(each) for each in wanted}) == len(wanted)
        assert all(len(set(each)) > 3 for each in wanted)


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {}, {"max_num_seqs": 6}], ids=["alone", "four", "crowd"])
def test_greedy_tokens_equal_transformers(case: Case, options: dict[str, Any]) -> None:
    llm = case.llm(**options)
    assert tokens(llm) == case.wanted
    check_nothing_is_held(llm)


@pytest.mark.parametrize("budget", [67, 131, 200])
def test_chunks_beside_decodes_equal_the_whole(case: Case, budget: int) -> None:
    assert tokens(case.llm(max_num_batched_tokens=budget)) == case.wanted


@pytest.mark.parametrize("count", [1, 2, 3, 17, 63, 64, 65, 128])
def test_a_prompt_cut_every_few_tokens_equals_the_whole(case: Case, count: int) -> None:
    # Off the delta rule's grid too: there the state is the same up to rounding.
    llm = case.llm(max_num_seqs=1)
    config = SchedulerConfig(page_size=16, max_model_len=256, max_num_seqs=1, max_num_batched_tokens=count, prefill_grid=count)
    llm.engine.scheduler = Scheduler(config, llm.engine.pool.ledger, slots_of(llm).ledger)
    assert tokens(llm, PROMPTS[1:3]) == case.wanted[1:3]


@pytest.mark.parametrize("fill", FILLS)
def test_poisoned_pages_and_slots_equal_zeroed_ones(case: Case, fill: str) -> None:
    llm = case.llm(kv_fill=fill)
    assert fill == "zero" or bool(slots_of(llm).buffer.any())
    assert tokens(llm) == case.wanted


def test_reused_slots_equal_fresh_ones(case: Case) -> None:
    llm = case.llm(max_num_seqs=2, kv_fill="nan")
    for _ in range(2):
        assert tokens(llm) == case.wanted
        check_nothing_is_held(llm)


def tight(case: Case, **options: Any) -> LLM:
    """Pages for two of SHORT at most, slots for four."""
    return case.llm(**{"page_size": 1, "num_pages": 90, "max_model_len": 80} | options)


@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_preempted_equals_undisturbed(case: Case, fill: str) -> None:
    llm = tight(case, kv_fill=fill)
    outputs = llm.generate(SHORT, GREEDY)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == case.wanted_short
    check_nothing_is_held(llm)


def test_a_slot_has_one_holder_while_its_request_runs_and_none_after(case: Case) -> None:
    llm = tight(case)
    engine, scheduler = llm.engine, llm.engine.scheduler
    ids = [engine.add(prompt, GREEDY) for prompt in SHORT]
    num_preempted = 0
    while engine.has_work:
        pieces = engine.step()
        slots_of(llm).check(held=[request.state_slot for request in scheduler.running])  # type: ignore[misc]
        assert all(request.state_slot is None for request in scheduler.waiting)
        num_preempted += sum(piece.output.num_preemptions for piece in pieces if piece.output)
    assert num_preempted > 0 and len(ids) == 6
    check_nothing_is_held(llm)


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_an_abort_at_any_step_gives_everything_back(case: Case) -> None:
    llm = tight(case, max_num_batched_tokens=67, kv_fill="nan")
    num_steps = 0
    while True:
        for prompt in SHORT:
            llm.engine.add(prompt, GREEDY)
        for _ in range(num_steps):
            llm.engine.step()
        if not llm.engine.has_work:
            break
        # One goes, and the others' books must agree; then all go.
        llm.engine.abort(next(iter(llm.engine._generations)))
        running = llm.engine.scheduler.running
        slots_of(llm).check(held=[request.state_slot for request in running])  # type: ignore[misc]
        llm.engine.abort_all()
        check_nothing_is_held(llm)
        num_steps += 1
    assert num_steps > NUM_TOKENS
    assert tokens(llm, SHORT) == case.wanted_short


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_others_go_on_when_one_is_aborted(case: Case) -> None:
    llm = case.llm(max_num_seqs=3)
    first, *others = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    outputs: dict[int, list[int]] = {}
    for step in range(200):
        if step == 4:
            assert llm.engine.abort(first) is not None
        outputs |= {piece.request_id: piece.output.token_ids for piece in llm.engine.step() if piece.output}
    assert [outputs[request_id] for request_id in others] == case.wanted[1:]


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_tensor", "fp8_token"])
def test_every_format_gives_the_same_tokens_in_a_poisoned_pool(case: Case, kv_format: str) -> None:
    clean, poisoned = (tokens(case.llm(kv_format=kv_format, kv_fill=fill)) for fill in ("zero", "nan"))
    assert clean == poisoned


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_pages_hold_attention_layers_and_slots_the_others(case: Case) -> None:
    llm = case.llm()
    assert llm.engine.pool.layout.num_layers == 2 and slots_of(llm).layout.num_layers == 2
    assert slots_of(llm).num_slots == 4


def test_a_model_without_states_has_no_slots() -> None:
    llm = make_llm()
    assert llm.engine.slots is None
    llm.engine.add([1, 2, 3], GREEDY)
    assert [row.state_slot for row in llm.engine.scheduler.schedule().rows] == [None]


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_a_pool_without_room_for_an_image_reuses_nothing_and_says_so(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    # 16 pages of one sequence, and images of one page.
    roomy = case.llm(num_pages=18)
    assert roomy.engine.scheduler.cache.enabled and not caplog.text
    llm = case.llm(num_pages=17)
    wanted = (
        "prefixes are not reused: a sequence of max_model_len 256 tokens and one state of 1 pages do not fit in 16 pages together; give num_pages 18 or more"
    )
    assert not llm.engine.scheduler.cache.enabled and wanted in caplog.text
    assert tokens(llm, PROMPTS[:2] * 2) == case.wanted[:2] * 2
    llm.engine.pool.check(held=())


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"state_checkpoint_interval_tokens": 0}])
def test_reuse_can_be_turned_off(case: Case, options: dict[str, Any]) -> None:
    llm = case.llm(**options)
    outputs = [llm.generate(PROMPTS[1], GREEDY)[0] for _ in range(2)]
    assert [(output.token_ids, output.num_cached_tokens, output.prefix_misses) for output in outputs] == [(case.wanted[1], 0, {})] * 2
    llm.engine.pool.check(held=())


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_outputs_tell_what_was_reused(case: Case) -> None:
    llm = case.llm(checkpoint_policy="prompt")
    first, again, other = (llm.generate(PROMPTS[1], GREEDY, cache_salt=salt)[0] for salt in (None, None, "another"))
    length = len(PROMPTS[1])
    assert [output.num_cached_tokens for output in (first, again, other)] == [0, (length - 1) // 16 * 16, 0]
    assert again.prefix_misses == {"not_indexed": length - again.num_cached_tokens}
    stats = llm.engine.prefix_stats
    assert (stats.num_queries, stats.num_hits, stats.num_saved_checkpoints) == (3 * length, again.num_cached_tokens, 2)
    assert stats.hit_rate == again.num_cached_tokens / (3 * length)
    with pytest.raises(RequestError, match="cache_salt '' is not a non-empty string; give one, or None"):
        llm.generate(PROMPTS[1], GREEDY, cache_salt="")
    stream = llm.generate_stream(PROMPTS[1], GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="requests that wait or run: 1, 0 is the limit for a reset of the prefix cache"):
        llm.reset_prefix_cache()
    stream.close()  # type: ignore[attr-defined]
    llm.reset_prefix_cache()
    llm.engine.pool.check(held=())
    assert llm.generate(PROMPTS[1], GREEDY)[0].num_cached_tokens == 0


def test_fewer_slots_than_sequences_are_refused(case: Case) -> None:
    config = SchedulerConfig(page_size=16, max_model_len=256, max_num_seqs=4)
    with pytest.raises(ConfigError, match="3 state slots are below max_num_seqs 4; give each running sequence one"):
        Scheduler(config, case.llm().engine.pool.ledger, SlotLedger(3))


# Negative controls: each breaks the engine in one place, and an equality above must notice.


def test_control_a_slot_that_is_not_cleared_shows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "clear", lambda self, slots: None)
    assert [output.finish_reason for output in case.llm(kv_fill="nan").generate(PROMPTS, GREEDY)] == ["error"] * 6
    reusing = case.llm(max_num_seqs=2)
    first = tokens(reusing, PROMPTS[:2])
    assert first == case.wanted[:2], "the first holders found zeros"
    assert tokens(reusing, PROMPTS[:2]) != first


def test_control_a_preempted_state_that_is_kept_shows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    clear = SlotPool.clear
    cleared: set[int] = set()

    def clear_once(self: SlotPool, slots: list[int]) -> None:
        clear(self, [slot for slot in slots if slot not in cleared])
        cleared.update(slots)

    monkeypatch.setattr(SlotPool, "clear", clear_once)
    llm = tight(case)
    assert tokens(llm, SHORT[:2]) == case.wanted_short[:2]
    assert tokens(llm, SHORT) != case.wanted_short


def next_slot(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    return torch.where(slots >= 0, (slots + 1) % num_slots, slots)


def test_control_a_decode_in_a_neighbours_slot_shows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    state_slots = BatchBuilder.state_slots
    monkeypatch.setattr(BatchBuilder, "state_slots", lambda self, step, size: next_slot(state_slots(self, step, size), 4))
    assert tokens(case.llm()) != case.wanted


def test_control_two_swapped_slots_show(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    state_slots = BatchBuilder.state_slots

    def swapped(self: BatchBuilder, step: Step, size: int) -> torch.Tensor:
        return state_slots(self, step, size).roll(1)

    monkeypatch.setattr(BatchBuilder, "state_slots", swapped)
    assert tokens(case.llm()) != case.wanted


@pytest.mark.parametrize("fault", [{"slot": 3}, {"resume": False}], ids=["written-into-another-slot", "chunk-starts-anew"])
def test_control_a_prefill_at_fault_shows(case: Case, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill: Callable[..., torch.Tensor] = engine_delta.delta_prefill

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        *own, slot = args
        return prefill(*own, fault.get("slot", slot), **options | {"resume": fault.get("resume", True)})

    monkeypatch.setattr(engine_delta, "delta_prefill", broken)
    assert tokens(case.llm(max_num_batched_tokens=67)) != case.wanted


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_control_a_slot_that_an_abort_keeps_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def forgetful(self: Scheduler, request: Request, *, discard: bool = False) -> None:
        request.state_slot = None
        release(self, request, discard=discard)

    llm = case.llm()
    llm.engine.add(PROMPTS[0], GREEDY)
    llm.engine.step()
    monkeypatch.setattr(Scheduler, "_release", forgetful)
    with pytest.raises(PoolCorruptError, match="slot 0 is held in the books and has 0 holders; it was lost without a release"):
        llm.engine.abort_all()
