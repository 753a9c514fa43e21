"""The engine benchmark's arithmetic: which tokens are counted, over which time, and the ratios that are drawn."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll import StreamPiece
from atoll.bench import engine
from atoll.bench.engine import EngineBenchOptions, EngineRow, report_lines, run_engine
from atoll.errors import ConfigError


class SteppingLLM:
    """Gives every sequence one token per step; in the first step of a batch only half of them."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(num_steps=0)

    def generate_stream(self, prompts: list[list[int]], params: Any) -> Iterator[StreamPiece]:
        late = set(range(len(prompts) // 2))
        for step in range(params.max_tokens + bool(late)):
            self.engine.num_steps += 1
            for index in range(len(prompts)):
                if (step == 0 and index in late) or (step == params.max_tokens and index not in late):
                    continue
                yield StreamPiece(index, index, "", [step])


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves one second each time it is read."""
    ticks = itertools.count(100.0, 1.0)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(ticks))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("batch", "counted"), [(1, 7), (4, 4 * 8 - 4 - 2)])
def test_tokens_count_from_when_every_sequence_has_one(batch: int, counted: int) -> None:
    # Of 4 sequences two start a step late, when the others get their second token: none of these is counted.
    rate, tokens = engine._run_own(SteppingLLM(), [1, 2], batch, EngineBenchOptions(new_tokens=8))  # type: ignore[arg-type]
    assert rate == counted
    assert len(tokens) == 8


@pytest.mark.usefixtures("ticking")
def test_peer_is_timed_from_its_first_new_token() -> None:
    class Peer:
        def generate(self, ids: torch.Tensor, *, attention_mask: torch.Tensor, generation_config: Any, streamer: Any) -> torch.Tensor:
            assert generation_config.max_new_tokens == 5
            streamer.put(ids)
            for token in range(5):
                streamer.put(torch.tensor([token]))
            streamer.end()
            return torch.cat([ids, torch.arange(5)[None]], dim=1)

    rate, tokens = engine._run_peer(Peer(), [7, 8, 9], EngineBenchOptions(new_tokens=5))
    assert (rate, tokens) == (4.0, [0, 1, 2, 3, 4])


def test_report_draws_both_ratios() -> None:
    def row(name: str, batch: int, rates: list[float], same: int | None = None) -> EngineRow:
        return EngineRow(name, "smollm2", batch, 32, 64, "bfloat16", None, 2, rates, same)

    rows = [row("atoll", 1, [30.0, 40.0, 36.0]), row("transformers", 1, [20.0, 20.0, 30.0], 64), row("atoll", 16, [144.0, 150.0, 180.0])]
    text = "\n".join(report_lines(rows))
    assert "atoll / transformers at batch 1: 1.50 (rounds 1.20 to 2.00); first 64 of 64 greedy tokens equal" in text
    assert "batch 16 / batch 1: 4.17 times the tokens/s" in text


def test_common_prefix() -> None:
    assert engine._common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert engine._common_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert engine._common_prefix([], [1]) == 0


def test_one_token_cannot_be_timed() -> None:
    with pytest.raises(ConfigError, match="new_tokens 1 is below 2"):
        run_engine(EngineBenchOptions(new_tokens=1))
