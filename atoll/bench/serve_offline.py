"""`bench serve --offline`: the same requests to an engine in this process, as many at a time: what a server's throughput is compared with. Knows no server."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.bench.serve import ServeOptions, ServeRun, Talk
from atoll.bench.serve_client import Outcome
from atoll.bench.serve_data import WORDS, Conversation, DataOptions, Turn, Vocabulary, make_data
from atoll.config import make_engine_config
from atoll.engine.build import choose_device, choose_dtype
from atoll.engine.llm import LLM
from atoll.engine.output import StreamPiece
from atoll.engine.prompts import encode_conversation, encode_prompt
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError, RequestError
from atoll.eval.endpoint import Endpoint
from atoll.models import Tokenizer, load_model


@dataclass(frozen=True)
class OfflineOptions:
    """An engine, and what is asked of it. `load.endpoint` is not asked."""

    model: str
    engine: dict[str, Any]  # fields of EngineConfig
    load: ServeOptions
    dataset: str
    data: DataOptions

    def __post_init__(self) -> None:
        if self.load.max_concurrency is None:
            raise ConfigError("max_concurrency is not given, and an engine without a server needs it; give for example --max-concurrency 16")
        if self.load.request_rate != float("inf") or self.load.leave_share or self.load.extra_body:
            raise ConfigError("request_rate, leave_share or extra_body is given, and an engine without a server has no clients; leave them out")

    @property
    def engine_options(self) -> dict[str, Any]:
        """A step holds as many sequences as there are requests at a time, unless another number is given."""
        return {"max_num_seqs": self.load.max_concurrency} | self.engine


def offline_load(path: str, **options: Any) -> ServeOptions:
    """A load without a server."""
    return ServeOptions(Endpoint("", ""), path, **options)


def run_offline(options: OfflineOptions, on_request: Callable[[], None] = lambda: None) -> ServeRun:
    """Load the model and answer everything. A request begins when another has ended, as a client with so many at a time would send it."""
    config = make_engine_config(options.engine_options)
    loaded = load_model(options.model, device=choose_device(config.device), dtype=choose_dtype(config.dtype))
    conversations = make_data(options.dataset, options.data, vocabulary_of(loaded.tokenizer), chat=options.load.chat)
    warmups = [conversations[number % len(conversations)][:1] for number in range(options.load.num_warmups)]
    with LLM.from_loaded(loaded, **options.engine_options) as llm:
        _Bench(llm, options.load).run(warmups)
        return _Bench(llm, options.load, on_request).run(conversations)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """As `find_vocabulary` finds it of a server."""
    token_ids = tokenizer.encode(" ".join(WORDS), add_special_tokens=False)
    return Vocabulary(tuple(sorted(set(token_ids))), len(token_ids) / len(WORDS))


@dataclass
class _Open:
    """A request that runs, and the turns that follow it."""

    talk: Talk
    later: list[Turn]
    outcome: Outcome = field(default_factory=lambda: Outcome(time.perf_counter()))


class _Bench:
    def __init__(self, llm: LLM, load: ServeOptions, on_request: Callable[[], None] = lambda: None) -> None:
        self._engine = llm.engine
        self._load = load
        self._on_request = on_request
        self._waiting: deque[tuple[Talk, list[Turn]]] = deque()
        self._open: dict[int, _Open] = {}  # by request id
        self._done: list[Outcome] = []

    def run(self, conversations: list[Conversation]) -> ServeRun:
        self._waiting.extend((Talk(self._load), list(conversation)) for conversation in conversations)
        begin_s = time.perf_counter()
        assert self._load.max_concurrency is not None
        while self._waiting or self._open:
            while self._waiting and len(self._open) < self._load.max_concurrency:
                self._begin(*self._waiting.popleft())
            pieces = self._engine.step()
            now_s = time.perf_counter()
            for piece in pieces:
                self._take(piece, now_s)
        return ServeRun(self._done, time.perf_counter() - begin_s)

    def _begin(self, talk: Talk, turns: list[Turn]) -> None:
        one = _Open(talk, turns[1:])
        body = talk.body(turns[0])
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=body.get("ignore_eos", False))
        try:
            self._open[self._engine.add(self._token_ids(body), params)] = one
        except RequestError as error:
            one.outcome.error = str(error)
            self._end(one, time.perf_counter())

    def _token_ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return encode_conversation(self._engine.tokenizer, body["messages"])
        prompt: str | list[int] = body["prompt"]
        return encode_prompt(self._engine.tokenizer, prompt) if isinstance(prompt, str) else prompt

    def _take(self, piece: StreamPiece, now_s: float) -> None:
        outcome = self._open[piece.request_id].outcome
        if piece.text:
            outcome.arrivals_s.append(now_s)
            outcome.text += piece.text
        if piece.output is not None:
            outcome.finished, outcome.error = True, piece.output.error
            outcome.prompt_tokens, outcome.told_output_tokens = len(piece.output.prompt_token_ids), len(piece.output.token_ids)
            outcome.cached_tokens = piece.output.num_cached_tokens
            self._end(self._open.pop(piece.request_id), now_s)

    def _end(self, one: _Open, now_s: float) -> None:
        one.outcome.end_s = now_s
        self._done.append(one.outcome)
        self._on_request()
        if one.later and one.outcome.error is None:
            one.talk.answered(one.outcome.text)
            self._waiting.appendleft((one.talk, one.later))
