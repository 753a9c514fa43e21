"""What a step does to pages and slots around its rows: the order, and that a state kept in an image goes on as if it had never left its slot."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.engine import runner as runner_module
from atoll.engine.runner import Runner, StepResult
from atoll.engine.step import SampleTask, StateCopy, Step, StepRow
from atoll.kv import PagePool, SlotPool, num_image_pages
from atoll.models import LoadedModel, load_model
from atoll.offload.base import NO_METADATA, Metadata
from tests.engine.tiny import make_llm
from tests.kit.waits import no_waits
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

TOKENS = [int(token) for token in torch.randint(0, 250, (140,), generator=torch.Generator().manual_seed(0))]
TASK = SampleTask(SamplingParams(temperature=0), seed=0, index=0)


def clears(pages: list[int]) -> Metadata:
    return Metadata(0, tuple(pages))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("qwen3_5")
    make_folder(folder, **CASES["qwen3_5"] | {"eos_token_id": None})
    return load_model(str(folder), device="cpu", dtype=torch.float32)


class Driver:
    """Steps by hand on an engine's runner, and the logits of each."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, fill: str = "nan", kv_format: str = "fp32") -> None:
        self.llm = LLM.from_loaded(loaded, kv_format=kv_format, num_pages=200, max_num_seqs=4, max_model_len=256, kv_fill=fill)
        self.logits: list[torch.Tensor] = []
        sample = runner_module.sample

        def recording(logits: torch.Tensor, tasks: Any) -> Any:
            self.logits.append(logits.clone())
            return sample(logits, tasks)

        monkeypatch.setattr(runner_module, "sample", recording)

    @property
    def slots(self) -> SlotPool:
        assert self.llm.engine.slots is not None
        return self.llm.engine.slots

    @property
    def pool(self) -> PagePool:
        return self.llm.engine.pool

    def image(self, first_page: int = 100) -> tuple[int, ...]:
        """Pages for one image, last first."""
        return tuple(range(first_page, first_page + num_image_pages(self.slots.layout.slot_bytes, self.pool.layout.page_bytes)))[::-1]

    def run(self, start: int, stop: int, slot: int, pages: list[int], **fields: Any) -> None:
        """TOKENS from `start` to `stop` of one sequence."""
        row = StepRow(0, start, TOKENS[start:stop], pages, TASK, slot)
        step = Step(**fields)
        (step.decodes if stop == start + 1 else step.prefills).append(row)
        self.llm.engine.runner.execute(step)


PAGES = list(range(20, 29))  # of 16 tokens: 144


def uninterrupted(driver: Driver, position: int) -> list[torch.Tensor]:
    driver.run(0, position, 0, PAGES)
    rest(driver, position, 0)
    return list(driver.logits)


def rest(driver: Driver, position: int, slot: int, **fields: Any) -> None:
    driver.run(position, 128, slot, PAGES, **fields)
    for at in range(128, 140):
        driver.run(at, at + 1, slot, PAGES)


@pytest.mark.parametrize("fill", ["zero", "nan", "random"])
@pytest.mark.parametrize("position", [64, 112])
def test_a_state_kept_in_an_image_goes_on_bit_for_bit(loaded: LoadedModel, position: int, fill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = uninterrupted(Driver(loaded, monkeypatch, fill), position)
    driver = Driver(loaded, monkeypatch, fill)
    image = driver.image()
    driver.run(0, position, 0, PAGES, saves=[StateCopy(0, image)])
    # Its slot goes to another sequence, and the slot that it comes back to held one.
    driver.slots.buffer.fill_(0xFF)
    rest(driver, position, 2, restores=[StateCopy(2, image)])
    assert len(driver.logits) == len(wanted) == 14
    assert all(torch.equal(a, b) for a, b in zip(driver.logits, wanted, strict=True))
    assert bool((driver.slots.buffer[3] == 0xFF).all()), "a slot that nothing names was written"


def test_a_state_is_saved_after_a_decode_step_too(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(loaded, monkeypatch)
    driver.run(0, 63, 0, PAGES)
    driver.run(63, 64, 0, PAGES, saves=[StateCopy(0, driver.image())])
    driver.run(64, 65, 0, PAGES)
    driver.run(64, 65, 1, PAGES, restores=[StateCopy(1, driver.image())])
    assert torch.equal(driver.logits[-1], driver.logits[-2])


def test_an_image_saved_and_restored_in_steps_without_rows(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(loaded, monkeypatch)
    driver.run(0, 64, 0, PAGES)
    execute = driver.llm.engine.runner.execute
    assert execute(Step(saves=[StateCopy(0, driver.image())])) == StepResult()
    assert execute(Step(restores=[StateCopy(3, driver.image())])) == StepResult()
    assert torch.equal(driver.slots.buffer[3], driver.slots.buffer[0])
    assert execute(Step(metadata=clears([5, 6, *driver.image()]))) == StepResult()
    assert not driver.pool.buffer[[5, 6, *driver.image()]].any()
    assert bool((driver.pool.buffer[7] == 0xFF).all())


def test_a_model_without_states_takes_no_copies() -> None:
    runner = make_llm(num_pages=20).engine.runner
    for step in (Step(saves=[StateCopy(0, (1,))]), Step(restores=[StateCopy(0, (1,))])):
        with pytest.raises(AssertionError, match="a model without states has no images"):
            runner.execute(step)


@pytest.mark.gpu
def test_a_state_kept_in_an_image_goes_on_bit_for_bit_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, with decode steps that are replayed from a graph."""
    make_folder(tmp_path, **CASES["qwen3_5"] | {"eos_token_id": None})
    loaded = load_model(str(tmp_path), device="cuda", dtype=torch.bfloat16)
    wanted = uninterrupted(Driver(loaded, monkeypatch, kv_format="bf16"), 64)
    driver = Driver(loaded, monkeypatch, kv_format="bf16")
    image = driver.image()
    driver.run(0, 64, 0, PAGES, saves=[StateCopy(0, image)])
    driver.slots.buffer.fill_(0xFF)
    rest(driver, 64, 2, restores=[StateCopy(2, image)])
    assert driver.llm.engine.runner.captured_sizes == [1]
    assert all(torch.equal(a, b) for a, b in zip(driver.logits, wanted, strict=True))


@pytest.mark.gpu
def test_clears_and_copies_do_not_wait_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, **CASES["qwen3_5"] | {"eos_token_id": None})
    driver = Driver(load_model(str(tmp_path), device="cuda", dtype=torch.bfloat16), monkeypatch, kv_format="bf16")
    image = driver.image()
    step = Step(metadata=clears([*image, 5]), restores=[StateCopy(1, image)], saves=[StateCopy(2, driver.image(150))])
    # Compiles the kernel.
    driver.llm.engine.runner.execute(step)
    with no_waits():
        driver.llm.engine.runner.execute(step)
    assert not driver.slots.buffer[1].any(), "the image was cleared before it was restored"


# The order


def order_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations of one step that has all of them, in order."""
    log: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            log.append(name)
            return function(*args, **options)

        return call

    # The classes' methods and the module's names, so that nobody can go around them.
    monkeypatch.setattr(PagePool, "clear", recorded("clear pages", PagePool.clear))
    monkeypatch.setattr(SlotPool, "clear", recorded("clear slots", SlotPool.clear))
    for name in ("restore_states", "save_states", "sample"):
        monkeypatch.setattr(runner_module, name, recorded(name, getattr(runner_module, name)))
    monkeypatch.setattr(Runner, "_forward", recorded("forward", Runner._forward))
    saved = driver.image(100)
    driver.run(0, 64, 0, PAGES, metadata=clears([*PAGES, 3]), restores=[StateCopy(1, saved)], saves=[StateCopy(0, driver.image(150))])
    return log


IN_ORDER = ["clear pages", "clear slots", "restore_states", "forward", "sample", "save_states"]


def test_a_step_runs_in_order(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_of(Driver(loaded, monkeypatch), monkeypatch) == IN_ORDER


def handed_out_again(driver: Driver) -> list[torch.Tensor]:
    """A step that clears the pages of its own row and image, as when the round that freed them handed them out again; then the rest, resumed."""
    image = driver.image()
    driver.run(0, 64, 0, PAGES, metadata=clears([*PAGES, *image]), saves=[StateCopy(0, image)])
    rest(driver, 64, 1, restores=[StateCopy(1, image)])
    return driver.logits


def test_pages_cleared_and_handed_out_in_one_step_hold_what_the_step_wrote(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = uninterrupted(Driver(loaded, monkeypatch), 64)
    assert all(torch.equal(a, b) for a, b in zip(handed_out_again(Driver(loaded, monkeypatch)), wanted, strict=True))


@pytest.mark.parametrize("late", ["after the restores", "after the rows", "after the saves"])
def test_control_clears_that_come_late_show(loaded: LoadedModel, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = uninterrupted(Driver(loaded, monkeypatch), 64)
    execute, run_rows = Runner.execute, Runner._run_rows

    def reordered(self: Runner, step: Step) -> Any:
        without = replace(step, metadata=NO_METADATA)
        if late == "after the rows":
            monkeypatch.setattr(Runner, "_run_rows", lambda self, step: (run_rows(self, step), self._pool.clear(cleared))[0])
        if late == "after the restores":
            monkeypatch.setattr(Runner, "_run_rows", lambda self, step: (self._pool.clear(cleared), run_rows(self, step))[1])
        cleared = step.metadata.clears
        sampled = execute(self, without)
        if late == "after the saves":
            self._pool.clear(cleared)
        return sampled

    monkeypatch.setattr(Runner, "execute", reordered)
    if late == "after the restores":
        # Nothing that one step writes is harmed yet; the recorded order is what catches it.
        assert order_of(Driver(loaded, monkeypatch), monkeypatch) == [
            "clear pages",
            "clear slots",
            "restore_states",
            "clear pages",
            "forward",
            "sample",
            "save_states",
        ]
        return
    logits = handed_out_again(Driver(loaded, monkeypatch))
    assert not all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


# Negative controls of the copies


@pytest.mark.parametrize("fault", ["saved before the rows", "restored into the wrong slot", "a chunk late", "not restored"])
def test_control_a_copy_at_fault_shows(loaded: LoadedModel, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = uninterrupted(Driver(loaded, monkeypatch, "zero"), 64)
    driver = Driver(loaded, monkeypatch, "zero")
    copy = StateCopy(0, driver.image())
    if fault == "saved before the rows":
        run_rows = Runner._run_rows
        monkeypatch.setattr(
            Runner,
            "_run_rows",
            lambda self, step: (runner_module.save_states(driver.slots, driver.pool, step.saves), step.saves.clear(), run_rows(self, step))[2],
        )
    if fault == "a chunk late":
        driver.run(0, 64, 0, PAGES)
        driver.run(64, 128, 0, PAGES, saves=[copy])
    else:
        driver.run(0, 64, 0, PAGES, saves=[copy])
    restores = {"not restored": [], "restored into the wrong slot": [replace(copy, state_slot=3)]}.get(fault, [replace(copy, state_slot=2)])
    driver.logits.clear()
    rest(driver, 64, 2, restores=restores)
    assert not torch.equal(driver.logits[0], wanted[1])
