"""A prompt cut at every token: through the runner, its pages and its slots, the logits of every position and the greedy tokens after it are transformers'."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.engine import delta as engine_delta
from atoll.engine.step import SampleTask, Step, StepRow
from atoll.models import LoadedModel, load_model
from tests.models.hybrids import CASES
from tests.models.test_llama import expected
from tests.models.tiny import VOCAB_SIZE, make_folder

NUM_TOKENS = 140  # two of the delta rule's chunks of 64, and a rest
TOKENS = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
NUM_NEW = 6
# Whole; in two at every token; in three and more, around the conv's width of 4 and the chunk of 64, and where pieces are one token.
CUTS: list[tuple[int, ...]] = [
    (),
    *((cut,) for cut in range(1, NUM_TOKENS)),
    *(
        (1, 2),
        (1, 69),
        (2, 5),
        (3, 64),
        (17, 40),
        (31, 63),
        (33, 66),
        (63, 64),
        (64, 65),
        (63, 65),
        (68, 69),
        (1, 2, 3, 4),
        (16, 32, 48, 64),
        (7, 14, 21, 28, 35),
    ),
]
PAGE_SIZE = 16
PAGES_EACH = -(-(NUM_TOKENS + NUM_NEW) // PAGE_SIZE)


class Recording:
    """A model that remembers the hidden states of its last pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> torch.Tensor:
        self.hidden = self._model.forward(*args)
        return self.hidden


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    logits: torch.Tensor  # [T, V] what transformers gives
    new_tokens: list[int]  # and generates


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_folder(folder, **CASES[request.param] | {"eos_token_id": None})
    with torch.no_grad():
        generated = oracle.generate(TOKENS[None], max_new_tokens=NUM_NEW, do_sample=False)[0, NUM_TOKENS:].tolist()
    return Case(load_model(str(folder), dtype=torch.float32), expected(oracle, TOKENS), generated)


class SplitRun:
    """Sequence `i` feeds TOKENS in pieces that end at `cuts[i]`; all sequences run side by side, each in pages and a slot of its own."""

    def __init__(self, case: Case, cuts: list[tuple[int, ...]]) -> None:
        self.cuts = cuts
        self.model = Recording(case.loaded.model)
        loaded = LoadedModel(self.model, case.loaded.config, case.loaded.tokenizer)  # type: ignore[arg-type]
        sizes = {"num_pages": 1 + len(cuts) * PAGES_EACH, "max_num_seqs": len(cuts), "max_model_len": NUM_TOKENS + NUM_NEW, "page_size": PAGE_SIZE}
        self.runner = LLM.from_loaded(loaded, kv_format="fp32", kv_fill="nan", **sizes).engine.runner

    def logits(self) -> torch.Tensor:
        """`[sequences, T, V]`."""
        found = torch.full((len(self.cuts), NUM_TOKENS, self.model.config.vocab_size), torch.nan)
        bounds = [list(pairwise([0, *cuts, NUM_TOKENS])) for cuts in self.cuts]
        for i_piece in range(max(map(len, bounds))):
            step = self.step({i: pieces[i_piece] for i, pieces in enumerate(bounds) if i_piece < len(pieces)})
            self.runner.execute(step)
            logits = self.model.logits(self.model.hidden)
            for row in step.rows:
                count = len(row.token_ids)
                found[row.request_id, row.start : row.start + count], logits = logits[:count], logits[count:]
            assert len(logits) == 0
        return found

    def new_tokens(self, first: torch.Tensor) -> list[list[int]]:
        """Greedy tokens after the prompt, of which the `first` [sequences] are known."""
        tokens = [[token] for token in first.tolist()]
        for position in range(NUM_TOKENS, NUM_TOKENS + NUM_NEW - 1):
            task = SampleTask(SamplingParams(temperature=0), seed=0, index=0)
            step = Step(decodes=[self.row(i, position, [own[-1]], task) for i, own in enumerate(tokens)])
            for i, sampled in self.runner.execute(step).tokens.items():
                assert sampled.token_id is not None
                tokens[i].append(sampled.token_id)
        return tokens

    def step(self, pieces: dict[int, tuple[int, int]]) -> Step:
        rows = [self.row(i, begin, TOKENS[begin:end].tolist()) for i, (begin, end) in pieces.items()]
        return Step(decodes=[row for row in rows if len(row.token_ids) == 1], prefills=[row for row in rows if len(row.token_ids) > 1])

    def row(self, i: int, start: int, token_ids: list[int], sample: SampleTask | None = None) -> StepRow:
        num_pages = -(-(start + len(token_ids)) // PAGE_SIZE)
        # Pages and slots in an order of their own, so that none is right by its number.
        pages = [1 + lane * len(self.cuts) + i for lane in range(num_pages)]
        return StepRow(i, start, token_ids, pages, sample, len(self.cuts) - 1 - i)


def errors(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """`[sequences, T]`: the largest difference of a position, relative to the largest logit."""
    return (logits - case.logits).abs().amax(2) / case.logits.abs().max()


def test_every_split_gives_the_logits_and_tokens_of_transformers(case: Case) -> None:
    run = SplitRun(case, CUTS)
    logits = run.logits()
    worst = errors(case, logits).amax(1)
    assert {cuts: error.item() for cuts, error in zip(CUTS, worst, strict=True) if not error < 1e-5} == {}
    tokens = run.new_tokens(logits[:, -1].argmax(1))
    assert {cuts: own for cuts, own in zip(CUTS, tokens, strict=True) if own != case.new_tokens} == {}
    assert len(set(case.new_tokens)) > 2


# Negative controls: at every split each of these must show, from the cut on and nowhere before.


def from_zeros(prefill: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    return prefill(*args, **options | {"resume": False})


def without_conv_state(prefill: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    *_, conv_states, _, slot = args
    conv_states[slot] = 0
    return prefill(*args, **options)


def without_recurrent_state(prefill: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    *_, states, slot = args
    states[slot] = 0
    return prefill(*args, **options)


@pytest.mark.parametrize("fault", [from_zeros, without_conv_state, without_recurrent_state])
def test_control_a_state_that_is_lost_between_pieces_shows_at_every_split(
    fault: Callable[..., torch.Tensor], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = engine_delta.delta_prefill
    monkeypatch.setattr(engine_delta, "delta_prefill", lambda *args, **options: fault(prefill, *args, **options))
    # A last piece of one token is a decode, which this fault does not touch.
    cuts = [(cut,) for cut in range(1, NUM_TOKENS - 1)]
    found = errors(case, SplitRun(case, cuts).logits())
    for (cut,), error in zip(cuts, found, strict=True):
        assert error[:cut].max() < 1e-5 < 1e-4 < error[cut:].max(), cut
