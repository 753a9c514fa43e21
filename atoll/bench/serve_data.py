"""What `bench serve` asks: random prompts, prompts that begin alike, conversations, or a file's. Sends nothing but a question about tokens."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.eval.endpoint import CONNECT_TIMEOUT_S, Endpoint, http

_TEXT = (
    "reef sand shell wave tide moon star boat sail rope net fish crab gull palm leaf root rain wind storm cloud sky dawn dusk night day year stone coral "
    "pearl salt water river lake shore cliff cave path road house door lamp fire smoke bread fruit milk honey tea cup plate spoon knife chair table bed book "
    "page pen ink letter song drum bell voice word name friend child mother father sister brother king queen"
)
WORDS = tuple(_TEXT.split())
# A word of a tokenizer that is not known.
_TOKENS_PER_WORD = 1.3


@dataclass(frozen=True)
class Turn:
    """What a user adds to a conversation."""

    said: str | list[int] | list[dict[str, str]]  # text, token ids (of the first turn alone), or whole messages
    output_len: int  # tokens asked for


Conversation = list[Turn]


@dataclass(frozen=True)
class Vocabulary:
    """How to say so many tokens to a server."""

    token_ids: tuple[int, ...] | None  # ordinary ones, to draw from; None: the server does not tell
    tokens_per_word: float

    def prompt(self, rng: random.Random, num_tokens: int, *, as_text: bool) -> str | list[int]:
        """Token ids where they may be sent, exactly so many; else about as many in words."""
        if self.token_ids is not None and not as_text:
            return rng.choices(self.token_ids, k=num_tokens)
        return " ".join(rng.choices(WORDS, k=max(1, round(num_tokens / self.tokens_per_word))))


@dataclass(frozen=True)
class DataOptions:
    """Lengths in tokens."""

    num_prompts: int = 1000  # requests, over all turns
    input_len: int = 1024  # of a random prompt, of what follows a shared prefix, of a user's turn
    output_len: int = 128
    range_ratio: float = 0.0  # lengths are uniform within 1 - ratio and 1 + ratio of these
    prefix_len: int = 512  # that shared-prefix prompts have in common
    num_prefixes: int = 1
    num_turns: int = 4
    seed: int = 0
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "prefix_len", "num_prefixes", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1; give 1 or more")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio {self.range_ratio} is outside 0 to below 1; 0.2 makes lengths of 80 to 120 %")


def find_vocabulary(endpoint: Endpoint) -> Vocabulary:
    """By the server's /tokenize, which vLLM has too; without one, lengths are a guess."""
    text = " ".join(WORDS)
    try:
        response = http.post(
            f"{endpoint.base_url}/tokenize",
            json={"model": endpoint.model, "prompt": text, "add_special_tokens": False},
            headers=endpoint.headers,
            timeout=CONNECT_TIMEOUT_S,
            trust_env=False,
        )
        tokens = response.json()["tokens"] if response.status_code == 200 else None
    except (http.HTTPError, ValueError, KeyError, TypeError):
        tokens = None
    return Vocabulary(tuple(sorted(set(tokens))), len(tokens) / len(WORDS)) if tokens else Vocabulary(None, _TOKENS_PER_WORD)


def make_data(dataset: str, options: DataOptions, vocabulary: Vocabulary, *, chat: bool) -> list[Conversation]:
    """The same for the same seed. Raises ConfigError for an unknown name, or a file of another form."""
    if dataset not in DATASETS:
        raise ConfigError(f"dataset {dataset!r} is unknown; use one of {', '.join(DATASETS)}")
    return DATASETS[dataset](options, vocabulary, chat)


def _random(options: DataOptions, vocabulary: Vocabulary, chat: bool) -> list[Conversation]:
    rng = random.Random(options.seed)
    return [
        [Turn(vocabulary.prompt(rng, _length(rng, options, options.input_len), as_text=chat), _length(rng, options, options.output_len))]
        for _ in range(options.num_prompts)
    ]


def _shared_prefix(options: DataOptions, vocabulary: Vocabulary, chat: bool) -> list[Conversation]:
    rng = random.Random(options.seed)
    prefixes = [vocabulary.prompt(rng, options.prefix_len, as_text=chat) for _ in range(options.num_prefixes)]
    made: list[Conversation] = []
    for number in range(options.num_prompts):
        own = vocabulary.prompt(rng, _length(rng, options, options.input_len), as_text=chat)
        made.append([Turn(_joined(prefixes[number % len(prefixes)], own), _length(rng, options, options.output_len))])
    return made


def _multi_turn(options: DataOptions, vocabulary: Vocabulary, chat: bool) -> list[Conversation]:
    """Text in every turn: an answer goes into the next prompt as the text that came."""
    rng = random.Random(options.seed)
    turns = [
        Turn(vocabulary.prompt(rng, _length(rng, options, options.input_len), as_text=True), _length(rng, options, options.output_len))
        for _ in range(options.num_prompts)
    ]
    return [turns[first : first + options.num_turns] for first in range(0, len(turns), options.num_turns)]


def _file(options: DataOptions, vocabulary: Vocabulary, chat: bool) -> list[Conversation]:
    """A line for each prompt, from the first on; "output_len" may give its own number of tokens."""
    path = options.path
    if path is None:
        raise ConfigError("dataset 'file' has no file; name a JSONL file with --dataset-path")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {str(path)!r} cannot be read: {error}; give a JSONL file with 'prompt' in each line") from error
    if not lines:
        raise ConfigError(f"dataset {str(path)!r} holds 0 prompts, 1 is the least; give another file")
    return [[_file_turn(path, i % len(lines) + 1, lines[i % len(lines)], options, chat=chat)] for i in range(options.num_prompts)]


def _file_turn(path: Path, number: int, line: str, options: DataOptions, *, chat: bool) -> Turn:
    try:
        entry: Any = json.loads(line)
        said = next(entry[name] for name in ("prompt", "question", "messages") if name in entry)
        output_len = int(entry.get("output_len", options.output_len))
    except (ValueError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(f"{path}:{number} is not a JSON object with 'prompt', 'question' or 'messages': {error!r}; mend that line") from error
    if "messages" in entry and said is entry["messages"] and not chat:
        raise ConfigError(f"{path}:{number} holds messages, which completions do not take; use --endpoint /v1/chat/completions")
    return Turn(said, output_len)


DATASETS: dict[str, Callable[[DataOptions, Vocabulary, bool], list[Conversation]]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "file": _file,
}


def _length(rng: random.Random, options: DataOptions, length: int) -> int:
    return max(1, round(length * rng.uniform(1 - options.range_ratio, 1 + options.range_ratio)))


def _joined(a: str | list[int], b: str | list[int]) -> str | list[int]:
    return f"{a} {b}" if isinstance(a, str) else [*a, *b]


def arrival_times(num: int, request_rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Seconds from the first request, which comes at 0: gamma-distributed gaps of mean 1 / request_rate.

    Burstiness is the gamma distribution's shape: 1 makes a Poisson process, less makes bursts, more makes the gaps even. An infinite rate sends all at once.
    """
    if not request_rate > 0 or not burstiness > 0:
        raise ConfigError(f"request_rate {request_rate} or burstiness {burstiness} is not above 0; give a positive number, or inf as rate for all at once")
    if request_rate == float("inf"):
        return [0.0] * num
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < num:
        times.append(times[-1] + rng.gammavariate(burstiness, 1 / (request_rate * burstiness)))
    return times[:num]
