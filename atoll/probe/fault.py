"""The fault that Atoll answers, on questions with known answers: attention that does not mask, and a pool whose free pages have held state images."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from atoll.engine.build import choose_device, choose_dtype
from atoll.engine.llm import LLM
from atoll.engine.output import RequestOutput
from atoll.engine.sampling import SamplingParams
from atoll.engine.step import StateCopy
from atoll.errors import ConfigError
from atoll.eval.numbers import flexible_number, is_number
from atoll.eval.questions import Question
from atoll.kv import num_image_pages, save_states
from atoll.models.loader import LoadedModel, load_model

Images = Literal["everywhere", "checkpoints"]

# Of each answer before the questions proper.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """One row of the table: a name, and the engine options that make it."""

    name: str
    options: dict[str, str]


@dataclass(frozen=True)
class FaultRow:
    """What one setup answered."""

    name: str
    attention_backend: str
    guard: bool
    kv_fill: str
    image_pages: int  # pages that were made to hold a state image, and released, before the questions; those of the engine's own checkpoints not counted
    questions: int
    exact: int
    empty: int  # answers without any text
    errors: int  # requests that ended in logits of NaN or Inf
    same_tokens: int  # answers that are token for token those of the first row

    @property
    def accuracy(self) -> float:
        return self.exact / self.questions


def setups(leaky_backend: str) -> tuple[Setup, ...]:
    """Our kernels in a clean and in a poisoned pool, then attention that does not mask, without the guard and with it."""
    return (
        Setup("masked, pool of zeros", {"kv_fill": "zero", "guard": "auto"}),
        Setup("masked, pool of NaN", {"kv_fill": "nan", "guard": "auto"}),
        Setup("not masked, no guard", {"attention_backend": leaky_backend, "kv_fill": "zero", "guard": "off"}),
        Setup("not masked, guard", {"attention_backend": leaky_backend, "kv_fill": "zero", "guard": "on"}),
    )


def probe_fault(
    model: str | LoadedModel,
    questions: Sequence[Question],
    *,
    leaky_backend: str = "leaky",
    max_tokens: int = 256,
    chat: bool = True,
    images: Images = "everywhere",
    **options: Any,
) -> Iterator[FaultRow]:
    """One row per setup, as each is done. All greedy; `options` as for LLM.

    With `images` "everywhere", before the questions every free page holds the image of a state and is released, which is what a pool looks like once
    checkpoints have come and gone. With "checkpoints", a few tokens of each answer are generated first, and only the engine's own checkpoints leave images:
    the pool must be small enough that it evicts them.

    Raises ConfigError for a model without states, and ConfigError, BackendError or ModelError for what LLM would refuse.
    """
    if isinstance(model, str):
        device = choose_device(options.get("device", "auto"))
        model = load_model(model, device=device, dtype=choose_dtype(options.get("dtype", "auto")))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    first: list[list[int]] | None = None
    for setup in setups(leaky_backend):
        llm = LLM.from_loaded(model, **options | setup.options)
        prompts = _prompts(llm, questions, chat=chat)
        with _errors_unsaid():
            image_pages = release_images(llm, prompts) if images == "everywhere" else 0
            if images == "checkpoints":
                llm.generate(list(prompts), _warm_up())
            outputs = llm.generate(prompts, params)
        tokens = [output.token_ids for output in outputs]
        first = first or tokens
        yield FaultRow(
            name=setup.name,
            attention_backend=llm.engine.runner.attention_backend,
            guard=llm.engine.guard is not None,
            kv_fill=setup.options["kv_fill"],
            image_pages=image_pages,
            questions=len(questions),
            exact=sum(is_exact(output, question) for output, question in zip(outputs, questions, strict=True)),
            empty=sum(not output.text.strip() for output in outputs),
            errors=sum(output.finish_reason == "error" for output in outputs),
            same_tokens=sum(a == b for a, b in zip(tokens, first, strict=True)),
        )
        # The next pool may need the memory of this one.
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_exact(output: RequestOutput, question: Question) -> bool:
    """The answer's number is the question's; an answer that broke off in an error is none."""
    return output.finish_reason != "error" and is_number(flexible_number(output.text), question.number)


def release_images(llm: LLM, prompts: Sequence[list[int]]) -> int:
    """Save the states that a few prompts leave in their slots into every free page, and release the pages again; returns their number."""
    engine, slots = llm.engine, llm.engine.slots
    if slots is None:
        raise ConfigError("the model keeps no states, so its pool never holds an image; use a hybrid model, such as one of type qwen3_5")
    llm.generate(list(prompts[: slots.num_slots]), _warm_up())
    need = num_image_pages(slots.layout.slot_bytes, engine.pool.layout.page_bytes)
    ledger = engine.pool.ledger
    num_images = ledger.num_free // need
    images = [ledger.allocate(need) for _ in range(num_images)]
    used = min(len(prompts), slots.num_slots)
    save_states(slots, engine.pool, [StateCopy(index % used, tuple(pages)) for index, pages in enumerate(images)])
    for pages in images:
        ledger.release(pages)
    return num_images * need


@contextmanager
def _errors_unsaid() -> Iterator[None]:
    """Requests are meant to fail here, by the thousand; the table counts them."""
    log = logging.getLogger("atoll.engine.engine")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _warm_up() -> SamplingParams:
    return SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0)


def _prompts(llm: LLM, questions: Sequence[Question], *, chat: bool) -> list[list[int]]:
    if chat:
        return llm.chat_prompts([[{"role": "user", "content": question.text}] for question in questions])
    return [llm.engine.tokenizer.encode(question.text) for question in questions]
