"""`bench engine`: decode tokens per second of the offline engine, beside transformers' generate on the same weights, in one interleaved run.

Counted is the time from the first new token (of the last sequence to have one) to the last: prefill is left out on both sides.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.engine.llm import LLM
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.models import LoadedModel, load_model, resolve_model

# Spoken on both sides as it is, from the model's own vocabulary; longer prompts repeat it.
PROMPT = "A coral reef is an underwater ecosystem built by colonies of small animals, and it shelters a quarter of all the species that live in the sea. "


@dataclass(frozen=True)
class EngineBenchOptions:
    """What to measure."""

    model: str = "demo"
    batches: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 32
    new_tokens: int = 64
    rounds: int = 5
    peer: bool = True  # transformers, batch 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None  # None: the model loader's choice for the device
    kv_format: str = "auto"


@dataclass
class EngineRow:
    """One engine at one batch size."""

    engine: str  # atoll, transformers
    model: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    dtype: str
    kv_format: str | None  # None: the peer keeps its cache in the model's dtype
    num_threads: int  # of torch on a CPU
    tokens_per_s: list[float] = field(default_factory=list)  # one per round
    same_tokens: int | None = None  # leading tokens that equal atoll's at batch 1; greedy

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def spread(self) -> float:
        return (max(self.tokens_per_s) - min(self.tokens_per_s)) / self.median


def run_engine(options: EngineBenchOptions, on_round: Callable[[int], None] = lambda done: None) -> list[EngineRow]:
    """Measure every batch size of the engine and the peer once per round, after one round that warms them up."""
    if options.new_tokens < 2 or not options.batches:
        raise ConfigError(f"new_tokens {options.new_tokens} is below 2 or no batch is given; the time between two tokens needs both")
    loaded = load_model(options.model, device=options.device, dtype=options.dtype)
    prompt = _prompt(loaded, options.prompt_tokens)
    llm = LLM.from_loaded(loaded, kv_format=options.kv_format, max_num_seqs=max(options.batches), max_model_len=len(prompt) + options.new_tokens)
    runs: list[tuple[EngineRow, Callable[[], tuple[float, list[int]]]]] = []
    for batch in options.batches:
        runs.append((_row("atoll", options, batch, loaded), lambda batch=batch: _run_own(llm, prompt, batch, options)))  # type: ignore[misc]
    if options.peer:
        peer = _load_peer(options.model, loaded, options.device)
        runs.insert(1, (_row("transformers", options, 1, loaded), lambda: _run_peer(peer, prompt, options)))
    own_tokens: list[int] = []
    for i_round in range(options.rounds + 1):
        for row, run in runs:
            rate, tokens = run()
            own_tokens = own_tokens or tokens
            if row.engine != "atoll":
                row.same_tokens = _common_prefix(own_tokens, tokens)
            if i_round > 0:
                row.tokens_per_s.append(rate)
        on_round(i_round)
    return [row for row, _ in runs]


def report_lines(rows: list[EngineRow]) -> list[str]:
    """Medians, and the ratios to transformers and to batch 1."""
    lines = [f"{row.engine:<12} batch {row.batch:>3}: {row.median:8.1f} tokens/s ±{row.spread / 2:.1%}" for row in rows]
    first = rows[0]
    for row in rows[1:]:
        if row.engine != "atoll":
            pairs = [own / other for own, other in zip(first.tokens_per_s, row.tokens_per_s, strict=True)]
            lines.append(
                f"atoll / {row.engine} at batch {row.batch}: {statistics.median(pairs):.2f} (rounds {min(pairs):.2f} to {max(pairs):.2f}); "
                f"first {row.same_tokens} of {row.new_tokens} greedy tokens equal"
            )
        else:
            lines.append(f"batch {row.batch} / batch {first.batch}: {row.median / first.median:.2f} times the tokens/s")
    return lines


def _row(engine: str, options: EngineBenchOptions, batch: int, loaded: LoadedModel) -> EngineRow:
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    kv_format = options.kv_format if engine == "atoll" else None
    return EngineRow(engine, options.model, batch, options.prompt_tokens, options.new_tokens, dtype, kv_format, torch.get_num_threads())


def _prompt(loaded: LoadedModel, num_tokens: int) -> list[int]:
    once = loaded.tokenizer.encode(PROMPT)
    return (once * -(-num_tokens // len(once)))[:num_tokens]


def _run_own(llm: LLM, prompt: list[int], batch: int, options: EngineBenchOptions) -> tuple[float, list[int]]:
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0, ignore_eos=True)
    started: set[int] = set()
    full_step: int | None = None  # the step in which the last sequence got its first token; what it and those before gave is not counted
    begin, num_timed = 0.0, 0
    tokens: list[int] = []
    for piece in llm.generate_stream([prompt] * batch, params):
        if full_step is not None and llm.engine.num_steps > full_step:
            num_timed += len(piece.token_ids)
        else:
            started.add(piece.index)
            begin = time.perf_counter()
            full_step = llm.engine.num_steps if len(started) == batch else None
        if piece.index == 0:
            tokens += piece.token_ids
    return num_timed / (time.perf_counter() - begin), tokens


def _load_peer(name: str, loaded: LoadedModel, device: torch.device) -> Any:
    import transformers

    path = resolve_model(name)
    if not path.is_dir() and importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"transformers loads {path.name} only with the package accelerate, which is missing; pip install accelerate, or leave transformers out"
        )
    transformers.utils.logging.disable_progress_bar()
    if path.is_dir():
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=loaded.model.dtype)
    else:
        options: dict[str, Any] = {"gguf_file": path.name, "dtype": loaded.model.dtype}
        if hasattr(transformers, "GgufConfig"):
            # Newer versions keep the weights packed, and then compute in another dtype than ours.
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        peer = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), **options)
    return peer.to(device).eval()


class _FirstTokenClock:
    """A transformers streamer: notes when the prompt and then the first new token came."""

    def __init__(self) -> None:
        self.num_puts = 0
        self.first_token_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_token_at = time.perf_counter()

    def end(self) -> None:
        pass


def _run_peer(peer: Any, prompt: list[int], options: EngineBenchOptions) -> tuple[float, list[int]]:
    import transformers

    config = transformers.GenerationConfig(max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([prompt], device=options.device)
    clock = _FirstTokenClock()
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
    tokens = out[0, len(prompt) :].tolist()
    return (len(tokens) - 1) / (time.perf_counter() - clock.first_token_at), tokens


def _common_prefix(a: list[int], b: list[int]) -> int:
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)
