"""The offline interface: prompts or messages in, outputs in the same order, or pieces of them as they come."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from atoll.config import make_engine_config
from atoll.engine.build import choose_device, choose_dtype, make_engine
from atoll.engine.engine import Engine
from atoll.engine.output import RequestOutput, StreamPiece
from atoll.engine.prompts import MESSAGE_EXAMPLE, Message, encode_conversation, encode_prompt
from atoll.engine.sampling import SamplingParams
from atoll.errors import RequestError
from atoll.offload.base_worker import Offload

if TYPE_CHECKING:
    from atoll.models.loader import LoadedModel

Prompt = str | list[int]


class LLM:
    """A model, its pool and an engine, in this process.

    ::

        llm = LLM("demo")
        [output] = llm.chat([{"role": "user", "content": "What is 12 * 12?"}], SamplingParams(temperature=0))
        print(output.text)

    `options` are the fields of atoll.config.EngineConfig. A bad prompt raises RequestError before any of the call's prompts is started; what goes wrong
    with one request later is told in its own output (finish_reason "error"), and the others go on. However a call ends, KeyboardInterrupt included, its
    requests are gone, and every page is free again or kept for a prefix.

    Raises ConfigError for a bad option, ModelError for a model that is missing or unsupported.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = make_engine_config(options)
        device = choose_device(config.device)
        # Not above: it brings in the tokenizer libraries, seconds that from_loaded can do without.
        from atoll.models.loader import load_model

        loaded = load_model(model, device=device, dtype=choose_dtype(config.dtype))
        self.engine: Engine = make_engine(loaded.model, loaded.config, loaded.tokenizer, config)

    @classmethod
    def from_loaded(cls, loaded: "LoadedModel", halves: Offload | None = None, **options: Any) -> Self:
        """An LLM around a model that is loaded already, on that model's device and in its dtype; `halves`: a connector of your own (atoll.offload.base)."""
        llm = cls.__new__(cls)
        llm.engine = make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(options), halves)
        return llm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request and, where pages are offloaded, keep what is on its way as far as the time allows. The LLM is not used again."""
        self.engine.close(timeout_s)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts.

        A prompt is text or a list of token ids; `params` is one for all, or one per prompt; None: the defaults of SamplingParams. Prefixes are reused only
        between calls with the same `cache_salt`.
        """
        pieces = self.generate_stream(prompts, params, cache_salt=cache_salt)
        outputs = {piece.index: piece.output for piece in pieces if piece.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def chat(self, messages: list[Message] | list[list[Message]], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        """Answer each conversation, a list of {"role": ..., "content": ...}, through the model's chat template."""
        return self.generate(self.chat_prompts(messages), params)

    def chat_prompts(self, messages: list[Message] | list[list[Message]]) -> list[list[int]]:
        """The token ids of each conversation; a prompt for generate_stream."""
        if not isinstance(messages, list) or not messages:
            raise RequestError(f"messages is {messages!r}; give a list of messages, each like {MESSAGE_EXAMPLE}, or a list of such lists")
        conversations: list[Any] = [messages] if isinstance(messages[0], dict) else messages
        return [encode_conversation(self.engine.tokenizer, conversation) for conversation in conversations]

    def generate_stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *, cache_salt: str | None = None
    ) -> Iterator[StreamPiece]:
        """As generate, piece by piece: a prompt's pieces, joined, are its output's text. Closing the iterator aborts what is left."""
        work = self._tokenize(prompts, params)
        # Checked here and not in the generator, so that a mistake is raised by the call itself.
        for token_ids, _, one_params in work:
            self.engine.check_request(token_ids, one_params, cache_salt)
        return self._stream(work, cache_salt)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that could be reused, so that all pages are free. Raises RequestError while a call still generates."""
        self.engine.reset_prefix_cache()

    def _stream(self, work: list[tuple[list[int], str | None, SamplingParams]], cache_salt: str | None) -> Iterator[StreamPiece]:
        if self.engine.has_work:
            raise RequestError("this LLM is still generating for an earlier call; use up or close that iterator first")
        try:
            for index, (token_ids, prompt, params) in enumerate(work):
                self.engine.add(token_ids, params, prompt=prompt, index=index, cache_salt=cache_salt)
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            self.engine.abort_all()
            self.engine.drain_transfers()

    def _tokenize(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[list[int], str | None, SamplingParams]]:
        many = _prompt_list(prompts)
        every = [params or SamplingParams()] * len(many) if params is None or isinstance(params, SamplingParams) else _params_list(params)
        if len(every) != len(many):
            raise RequestError(f"{len(every)} sampling params for {len(many)} prompts; give one for all, or one per prompt")
        work: list[tuple[list[int], str | None, SamplingParams]] = []
        for prompt, one_params in zip(many, every, strict=True):
            text = prompt if isinstance(prompt, str) else None
            work.append((encode_prompt(self.engine.tokenizer, text) if text is not None else list(prompt), text, one_params))  # type: ignore[arg-type]
        return work


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a flat list of ints is one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(f"prompts {prompts!r} is a {type(prompts).__name__}; give text, a list of token ids, or a list of either")
    many = list(prompts)
    if many and all(isinstance(entry, int) for entry in many):
        return [many]  # type: ignore[list-item]
    for entry in many:
        if not isinstance(entry, (str, list)):
            raise RequestError(f"prompt {entry!r} is a {type(entry).__name__}; give text or a list of token ids")
    return many  # type: ignore[return-value]


def _params_list(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise RequestError(f"params {params!r} is neither SamplingParams nor a list of them; give one for all prompts, or one per prompt")
    return list(params)
