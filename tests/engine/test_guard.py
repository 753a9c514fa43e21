"""The guard around attention that does not mask: right tokens whatever a page held, and wrong ones as soon as any part of the guard is taken away."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.config import EngineConfig
from atoll.engine.build import make_guard
from atoll.engine.runner import Runner
from atoll.engine.step import Step, StepRow
from atoll.errors import ConfigError
from atoll.kv import PageLedger, PagePool, ReleaseGuard
from atoll.models import LoadedModel, load_model
from tests.engine.tiny import make_llm, prompts
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = prompts(6, longest=40)


def leaky_llm(**options: Any) -> LLM:
    return make_llm(**{"attention_backend": "leaky", "num_pages": 60, "max_num_seqs": 4} | options)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def release_images(llm: LLM, fill: str = "nan") -> None:
    """Every free page holds an image for a while, and comes back."""
    ledger = llm.engine.pool.ledger
    pages = ledger.allocate(ledger.num_free)
    llm.engine.pool.poison(pages, fill)  # type: ignore[arg-type]
    ledger.release(pages)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What the masking backend generates."""
    return tokens(make_llm(num_pages=60, max_num_seqs=4))


def test_without_images_the_leaky_backend_is_right(wanted: list[list[int]]) -> None:
    # What requests leave behind is finite.
    llm = leaky_llm(guard="off")
    for _ in range(2):
        assert tokens(llm) == wanted


@pytest.mark.parametrize("fill", ["nan", "inf", "max", "random", "0x7f"])
def test_images_that_came_back_change_nothing_with_the_guard(wanted: list[list[int]], fill: str) -> None:
    llm = leaky_llm()
    assert llm.engine.guard is not None, "auto is on for a backend that does not mask"
    for _ in range(2):
        release_images(llm, fill)
        assert tokens(llm) == wanted
    assert not llm.engine.pool.buffer[0].any()


@pytest.mark.parametrize("fill", ["nan", "inf", "random"])
def test_a_poisoned_pool_changes_nothing_with_the_guard(wanted: list[list[int]], fill: str) -> None:
    assert tokens(leaky_llm(kv_fill=fill)) == wanted


@pytest.mark.parametrize(
    "options", [{"num_pages": 90, "page_size": 1, "max_model_len": 80}, {"page_size": 4, "max_model_len": 80, "max_num_batched_tokens": 67}]
)
def test_preemption_and_small_pages_change_nothing_with_the_guard(wanted: list[list[int]], options: dict[str, Any]) -> None:
    llm = leaky_llm(kv_fill="nan", **options)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == wanted
    assert options["page_size"] > 1 or sum(output.num_preemptions for output in outputs) > 0
    assert not llm.engine.pool.buffer[0].any()


# What an engine with a guard never lets a kernel see: a row that nobody wrote since its page was free.


class TailWatch:
    """Before the rows of each step: every unowned row of the pages that they name is zero."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rows = 0
        run_rows = Runner._run_rows

        def watched(runner: Runner, step: Step) -> Any:
            for row in step.rows:
                self.check(runner._pool, row)
            assert not runner._pool.buffer[0].any()
            return run_rows(runner, step)

        monkeypatch.setattr(Runner, "_run_rows", watched)

    def check(self, pool: PagePool, row: StepRow) -> None:
        kv = pool.layer_kv(0)
        for first in range(row.start, len(row.pages) * pool.layout.page_size):
            page, offset = row.pages[first // pool.layout.page_size], first % pool.layout.page_size
            assert not kv.k[page, :, offset].any() and not kv.v[page, :, offset].any(), (row, first)
            self.num_rows += 1


def test_at_any_abort_and_preemption_no_row_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TailWatch(monkeypatch)
    llm = leaky_llm(page_size=2, num_pages=45, max_model_len=80, kv_fill="nan", max_num_batched_tokens=67)
    num_preempted = 0
    for num_steps in range(0, 26, 3):
        ids = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(num_steps):
            llm.engine.step()
        num_preempted += sum(generation.request.num_preemptions for generation in llm.engine._generations.values())
        llm.engine.abort(ids[num_steps % 6])
        llm.engine.step()
        llm.engine.abort_all()
    assert num_preempted > 0 and watch.num_rows > 500


def test_control_the_watch_sees_a_page_that_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    TailWatch(monkeypatch)
    monkeypatch.setattr(ReleaseGuard, "take", lambda self: [])
    llm = leaky_llm()
    tokens_once = llm.generate(PROMPTS[:1], GREEDY)
    assert tokens_once
    with pytest.raises(AssertionError):
        llm.generate(PROMPTS[1:2], GREEDY)


# Positive controls: without the guard the backend leaks, through each place alone.


def broken(llm: LLM, wanted: list[list[int]]) -> bool:
    outputs = llm.generate(PROMPTS, GREEDY)
    return [output.token_ids for output in outputs] != wanted and "error" in {output.finish_reason for output in outputs}


def test_control_images_without_the_guard_show(wanted: list[list[int]]) -> None:
    llm = leaky_llm(guard="off")
    release_images(llm)
    assert broken(llm, wanted)
    release_images(llm)
    said = [output.error for output in llm.generate(PROMPTS, GREEDY) if output.error]
    assert said
    assert all("attention backend leaky does not mask unowned rows: turn the guard on" in error for error in said)


def test_control_tails_alone_leak(wanted: list[list[int]]) -> None:
    llm = leaky_llm(guard="off", kv_fill="nan")
    llm.engine.pool.clear([0])
    assert broken(llm, wanted)


def test_control_padded_lanes_alone_leak(wanted: list[list[int]]) -> None:
    llm = leaky_llm(guard="off")
    llm.engine.pool.poison([0], "nan")
    assert broken(llm, wanted)


# Negative controls: each takes a part of the guard away.


def test_control_released_pages_that_are_not_zeroed_show(wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReleaseGuard, "take", lambda self: [])
    llm = leaky_llm()
    release_images(llm)
    assert broken(llm, wanted)


def test_control_a_release_that_is_not_reported_shows(wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    set_free = PageLedger._set_free

    def silent(self: PageLedger, page: int) -> None:
        reported, self._on_free = self._on_free, None
        set_free(self, page)
        self._on_free = reported

    monkeypatch.setattr(PageLedger, "_set_free", silent)
    llm = leaky_llm()
    release_images(llm)
    assert broken(llm, wanted)


def test_control_clears_a_step_late_show(wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    take = ReleaseGuard.take
    late: list[int] = []

    def previous(self: ReleaseGuard) -> list[int]:
        pages, late[:] = late[:], take(self)
        return pages

    monkeypatch.setattr(ReleaseGuard, "take", previous)
    llm = leaky_llm()
    release_images(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] != wanted


def test_control_a_null_page_with_nan_shows(wanted: list[list[int]]) -> None:
    llm = leaky_llm()
    llm.engine.pool.poison([0], "nan")
    assert broken(llm, wanted)


def test_control_a_null_page_that_is_not_zeroed_at_the_start_shows(wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PagePool.clear
    monkeypatch.setattr(PagePool, "clear", lambda self, pages: clear(self, [page for page in pages if page]))
    assert broken(leaky_llm(kv_fill="nan"), wanted)


def test_control_a_null_page_that_is_handed_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    TailWatch(monkeypatch)
    llm = leaky_llm(prefix_caching=False)
    llm.engine.pool.ledger._free.append(0)
    llm.engine.add(PROMPTS[1], GREEDY)
    llm.engine.step()
    # What the first step wrote there, every padded lane would read in the second.
    with pytest.raises(AssertionError):
        llm.engine.step()


# A hybrid model, whose images are real ones


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("qwen3_5")
    make_folder(folder, **CASES["qwen3_5"] | {"eos_token_id": None})
    return load_model(str(folder), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp8_tensor", "fp8_token"])
def test_a_hybrid_model_in_every_format(hybrid: LoadedModel, kv_format: str) -> None:
    options = {"kv_format": kv_format, "num_pages": 60, "max_num_seqs": 4, "max_model_len": 256}
    masked = tokens(LLM.from_loaded(hybrid, **options))
    guarded, open_ = (LLM.from_loaded(hybrid, attention_backend="leaky", guard=guard, **options) for guard in ("auto", "off"))
    for llm in (guarded, open_):
        release_images(llm)
    assert tokens(guarded) == masked
    assert broken(open_, masked)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_a_hybrid_model_on_a_gpu(tmp_path: Path, kv_format: str) -> None:
    """Within the leaky backend, since another kernel's rounding may choose another token."""
    make_folder(tmp_path, **CASES["qwen3_5"] | {"eos_token_id": None})
    loaded = load_model(str(tmp_path), device="cuda", dtype=torch.bfloat16)
    options = {"attention_backend": "leaky", "kv_format": kv_format, "num_pages": 60, "max_num_seqs": 4, "max_model_len": 256}
    clean, guarded, bare = (LLM.from_loaded(loaded, guard=guard, **options) for guard in ("off", "auto", "off"))  # type: ignore[arg-type]
    wanted = tokens(clean)
    for llm in (guarded, bare):
        release_images(llm)
    assert tokens(guarded) == wanted
    assert guarded.engine.runner.captured_sizes == []
    assert broken(bare, wanted)


# The option


@pytest.mark.parametrize(
    ("guard", "masks", "on"), [("auto", True, False), ("auto", False, True), ("on", True, True), ("off", False, False), ("off", True, False)]
)
def test_auto_follows_the_backend(guard: str, masks: bool, on: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = make_guard(EngineConfig(guard=guard, attention_backend="leaky"), 5, masks=masks)
    assert (found is not None) == on
    warned = "attention backend leaky does not mask unowned rows and the guard is off" in caplog.text
    assert warned == (guard == "off" and not masks)


def test_pages_of_any_fill_but_zero_are_dirty() -> None:
    for fill, dirty in (("zero", []), ("nan", [1, 2, 3, 4])):
        guard = make_guard(EngineConfig(guard="on", kv_fill=fill), 5, masks=True)
        assert guard is not None and guard.take() == dirty


def test_a_masking_backend_may_be_guarded_too(wanted: list[list[int]]) -> None:
    llm = make_llm(guard="on", num_pages=60, max_num_seqs=4, kv_fill="nan")
    release_images(llm)
    assert tokens(llm) == wanted
    assert not llm.engine.pool.buffer[0].any()


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(ConfigError, match="guard 'maybe' is unknown; use one of auto, on, off"):
        make_llm(guard="maybe")
