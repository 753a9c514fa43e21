"""Offloaded and fetched gives the tokens of resident: in every KV format, for dense and hybrid models, through chats, crowds, odd paces and failures.

The oracle is each prompt alone in a pool of zeros, without reuse; `tests.offload.cases.answers` makes sure that no choice hangs on a rounding.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from atoll import RequestOutput
from atoll.offload.base import BlobKind
from tests.engine.test_prefix_equalities import shared_prompts
from tests.offload.cases import GRID, PAGE, Bench, answers, evict_all, greedy, make_llm, prompt, tokens
from tests.offload.paces import (
    Outcome,
    Pace,
    a_copy_a_poll,
    after_polls,
    all_arrives,
    at_once,
    at_random,
    backwards,
    half_of_each_load,
    loads_fail,
    states_fail,
    stores_fail,
)

FORMATS = ["fp32", "bf16", "fp8_tensor", "fp8_token"]
CASES = [("llama", "fp32"), ("llama", "fp8_token"), *(("qwen3_5", one) for one in FORMATS), ("qwen3_next", "fp32")]
WORK = shared_prompts()
NUM_TOKENS = 6


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


def usable(name: str, tokens: list[int]) -> int:
    """Tokens of a prompt that is known whole which need not be computed."""
    unit = PAGE if name == "llama" else GRID
    return (len(tokens) - 1) // unit * unit


def test_fetched_equals_resident(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the second pass comes from the connector: the pool has forgotten it, and holds NaN in its place."""
    name, kv_format = case
    wanted = answers(name, WORK, NUM_TOKENS, kv_format)
    bench = Bench(name, monkeypatch, after_polls(1), options={"kv_format": kv_format, "max_num_seqs": 1})
    assert tokens(bench.llm.generate(WORK, greedy(NUM_TOKENS))) == wanted
    for one, answer in zip(WORK, wanted, strict=True):
        evict_all(bench.llm)
        output = bench.serve(one, NUM_TOKENS)
        assert output.token_ids == answer
        assert output.num_fetched_tokens == output.num_cached_tokens == usable(name, one)
    bench.check()


def test_a_pool_for_one_sequence_fetches_what_it_cannot_keep(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, kv_format = case
    work = [prompt(length, seed) for length, seed in ((150, 200), (140, 201), (149, 203))]
    wanted = answers(name, work, NUM_TOKENS, kv_format)
    # 10 pages of a sequence, an image's, and hardly more.
    image_pages = make_llm(name, kv_format=kv_format).engine.scheduler.cache.image_pages
    options = {"kv_format": kv_format, "num_pages": 12 + image_pages, "max_model_len": 160}
    bench = Bench(name, monkeypatch, a_copy_a_poll, options=options)
    first, again = (bench.llm.generate(work, greedy(NUM_TOKENS)) for _ in range(2))
    assert tokens(first) == wanted == tokens(again)
    for output, one in zip(again, work, strict=True):
        assert output.num_cached_tokens == usable(name, one)
        assert output.num_fetched_tokens >= 0.75 * output.num_cached_tokens
    bench.check()


def test_the_next_turn_of_a_chat_is_fetched(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a turn, too: its last boundary was stored as the request ended."""
    name, kv_format = case
    bench = Bench(name, monkeypatch, backwards, options={"kv_format": kv_format})
    base = WORK[1]
    first = bench.serve(base, 40)
    evict_all(bench.llm)
    turn = [*base, *first.token_ids, 7, 8, 9]
    second = bench.serve(turn, NUM_TOKENS)
    # All but the last token of the answer was computed, and a hybrid leaves its state at the last boundary that it reached.
    unit = PAGE if name == "llama" else GRID
    assert second.num_fetched_tokens == (len(base) + 39) // unit * unit > len(base) // unit * unit
    assert second.token_ids == answers(name, [turn], NUM_TOKENS, kv_format)[0]
    bench.check()


def fetched_in_rounds(bench: Bench, name: str, num_rounds: int) -> int:
    """Tokens fetched over rounds of the same work, each of which must give the right ones and is evicted after."""
    wanted = answers(name, WORK, NUM_TOKENS)
    fetched = 0
    for _ in range(num_rounds):
        outputs = bench.llm.generate(WORK, greedy(NUM_TOKENS))
        assert tokens(outputs) == wanted
        fetched += sum(output.num_fetched_tokens for output in outputs)
        evict_all(bench.llm)
    return fetched


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4, "num_pages": 400},
        {"page_size": 64, "num_pages": 40},
        {"attention_backend": "auto", "guard": "off"},
        {"state_checkpoint_interval_tokens": 64, "checkpoint_policy": "ladder"},
        {"checkpoint_policy": "demand"},
    ],
    ids=lambda options: "-".join(f"{name} {value}" for name, value in options.items()),
)
def test_other_pages_backends_and_places_for_states(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch, after_polls(2), options=options)
    assert fetched_in_rounds(bench, "qwen3_5", 3) >= 2 * GRID
    bench.check()


def paces() -> dict[str, Callable[[], Pace]]:
    return {
        "at once": lambda: at_once,
        "after 5 polls": lambda: after_polls(5),
        "a copy a poll": lambda: a_copy_a_poll,
        "backwards": lambda: backwards,
        "random": lambda: at_random(Random(5)),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("pace", paces())
def test_a_crowd_at_any_pace(name: str, pace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time in a pool for two, some of whom share what they load."""
    bench = Bench(name, monkeypatch, paces()[pace](), options={"num_pages": 34, "max_num_batched_tokens": 72, "max_model_len": 200})
    assert fetched_in_rounds(bench, name, 2) >= 3 * GRID
    bench.check()


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("outcome", [loads_fail, half_of_each_load, states_fail, stores_fail], ids=lambda outcome: outcome.__name__)
def test_a_crowd_whose_transfers_fail(name: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name, monkeypatch, at_random(Random(6)), options={"num_pages": 34, "max_num_batched_tokens": 72, "max_model_len": 200})
    wanted = answers(name, WORK, NUM_TOKENS)
    for outcome_now in (all_arrives if outcome is not stores_fail else outcome, outcome):
        bench.worker.outcome = outcome_now
        assert tokens(bench.llm.generate(WORK, greedy(NUM_TOKENS))) == wanted
        evict_all(bench.llm)
    assert outcome is stores_fail or bench.connector.num_lost_loads > 0 or (name, outcome) == ("llama", states_fail)
    bench.check()


def test_salts_never_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    base = WORK[1]
    outputs: list[RequestOutput] = []
    for salt in ("a", "b", None, "a", "b", None):
        outputs.append(bench.serve(base, NUM_TOKENS, salt))
        evict_all(bench.llm)
    assert [output.num_fetched_tokens for output in outputs] == [0] * 3 + [usable("qwen3_5", base)] * 3
    assert tokens(outputs) == answers("qwen3_5", [base], NUM_TOKENS) * 6
    bench.check()


# Negative controls: blobs of others, or of other bytes, must show.


@pytest.mark.parametrize("kind", BlobKind)
def test_control_a_blob_of_another_prompt_shows(kind: BlobKind, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5", monkeypatch)
    base = WORK[1]
    bench.store(base)
    blobs = bench.worker.blobs
    own = [key for key in blobs if key[0] is kind]
    bench.store(WORK[3] * 3)
    other = next(blob for key, blob in blobs.items() if key[0] is kind and key not in own)
    blobs |= dict.fromkeys(own, other)
    assert bench.serve(base, NUM_TOKENS).token_ids != answers("qwen3_5", [base], NUM_TOKENS)[0]
