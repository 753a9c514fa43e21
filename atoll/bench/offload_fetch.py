"""`bench offload`, part 2: the first token of a prompt that is computed, resident in the pool, and fetched from the tiers.

Predicted for an H200 and Qwen3.5-35B-A3B's shape in bf16, before it was measured: 32,768 tokens are 671 MB of pages and a state of 64 MB, 14 ms at 53 GB/s; so
fetched is resident and 20 ms, and computed takes seconds.
"""

import itertools
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.bench.model import give_back
from atoll.engine.llm import LLM
from atoll.engine.output import RequestOutput
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.models.loader import LoadedModel


@dataclass(frozen=True)
class FetchOptions:
    """One prompt length, one model, one set of tiers."""

    model: str = "demo"  # a name for the rows
    context: int = 256  # tokens of the prompt
    kv_format: str = "bf16"
    page_size: int = 16  # tokens
    offload: str = "host:256MiB"
    rounds: int = 5
    seed: int = 0


@dataclass
class FetchRow:
    """Seconds from a request to its first token, once a round: of a new prompt, of the same again, and again after the pool has forgotten it."""

    model: str
    context: int  # tokens of the prompt
    kv_format: str
    page_size: int  # tokens
    offload: str
    resident_tokens: int = 0  # that were not computed, the second time
    fetched_tokens: int = 0  # that came from the tiers, the third time
    computed_s: list[float] = field(default_factory=list)
    resident_s: list[float] = field(default_factory=list)
    fetched_s: list[float] = field(default_factory=list)
    loaded_bytes: int | None = None  # of the last fetch
    loaded_seconds: float | None = None  # of its transfers, on the copies' clock
    fault: str | None = None

    @property
    def speedup(self) -> float:
        """Computed by fetched."""
        return statistics.median(self.computed_s) / statistics.median(self.fetched_s)


def time_fetch(loaded: "LoadedModel", options: FetchOptions) -> FetchRow:
    """Time the first token each way. Raises ConfigError where the model or the tiers cannot hold the prompt."""
    row = FetchRow(options.model, options.context, options.kv_format, options.page_size, options.offload)
    least, most = 2 * options.page_size + 1, loaded.config.max_position - 1
    if not least <= options.context <= most:
        raise ConfigError(f"context {options.context} is outside {least} to {most} tokens for {options.model}; give tokens in that range")
    give_back(loaded.model.device)
    # Room for several such prompts and their states, so that nothing is evicted.
    llm = LLM.from_loaded(
        loaded, page_size=options.page_size, kv_format=options.kv_format, max_num_seqs=4, max_model_len=options.context + 1, offload=options.offload
    )
    try:
        _time_rounds(llm, row, options, loaded.config.vocab_size)
    finally:
        llm.close()
    return row


def fetch_line(row: FetchRow) -> str:
    computed, resident, fetched = (statistics.median(times) * 1e3 for times in (row.computed_s, row.resident_s, row.fetched_s))
    moved = f", {row.loaded_bytes / 1e6:.1f} MB in {row.loaded_seconds * 1e3:.1f} ms" if row.loaded_bytes and row.loaded_seconds else ""
    return (
        f"{row.model} {row.kv_format}: first token of {row.context}: computed {computed:.1f} ms, fetched {fetched:.1f} ({row.speedup:.1f} times; "
        f"{row.fetched_tokens} tokens{moved}), resident {resident:.1f}"
    )


def _time_rounds(llm: LLM, row: FetchRow, options: FetchOptions, vocab_size: int) -> None:
    rand = random.Random(options.seed)
    # The first round compiles.
    for i_round in range(options.rounds + 1):
        prompt = [rand.randrange(vocab_size) for _ in range(options.context)]
        computed_s, computed = _first_token(llm, prompt)
        resident_s, resident = _first_token(llm, prompt)
        _forget_in_pool(llm)
        before = _loaded(llm)
        fetched_s, fetched = _first_token(llm, prompt)
        after = _loaded(llm)
        row.resident_tokens, row.fetched_tokens = resident.num_cached_tokens, fetched.num_fetched_tokens
        row.loaded_bytes, row.loaded_seconds = int(after[0] - before[0]), after[1] - before[1]
        if not computed.token_ids == resident.token_ids == fetched.token_ids:
            row.fault = f"first tokens differ: computed {computed.token_ids}, resident {resident.token_ids}, fetched {fetched.token_ids}"
        elif computed.num_cached_tokens or not 0 < row.fetched_tokens == row.resident_tokens:
            row.fault = (
                f"of {options.context} tokens {computed.num_cached_tokens} were there at first, {row.resident_tokens} resident, {row.fetched_tokens} fetched"
            )
        if i_round:
            row.computed_s.append(computed_s)
            row.resident_s.append(resident_s)
            row.fetched_s.append(fetched_s)


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, RequestOutput]:
    """Seconds until the first piece, and the output. What follows, such as stores that end, is waited for and not counted."""
    begin = time.perf_counter()
    pieces = llm.generate_stream([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    first = next(pieces)
    seconds = time.perf_counter() - begin
    [output] = [piece.output for piece in itertools.chain([first], pieces) if piece.output is not None]
    return seconds, output


def _forget_in_pool(llm: LLM) -> None:
    """What the tiers have stays there, unlike at `reset_prefix_cache`."""
    llm.engine.scheduler.cache.reset()


def _loaded(llm: LLM) -> tuple[int, float]:
    """Bytes that came from the tiers so far, and the seconds they took."""
    stats = llm.engine.offload_stats
    return (stats.loaded_bytes, stats.loaded_seconds) if stats is not None else (0, 0.0)
