"""The JSON bodies that clients send, as pydantic models: OpenAI's fields, and the further ones that serving engines share; knows no engine.

A field that Atoll does not know is refused, and so is one that it knows and cannot do, unless its value asks for nothing: silence would look like obedience.
"""

import re
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from atoll.engine.prompts import check_text
from atoll.engine.sampling import MAX_SEED, SamplingParams
from atoll.errors import RequestError

MAX_COUNT = 2**31 - 1  # of anything; so that a number never fills an error
MAX_TOOLS = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

TokenIds = list[StrictInt]
StopText = Annotated[StrictStr, Field(max_length=MAX_STOP_CHARS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    include_usage: bool = False  # one more chunk with the usage, before [DONE]
    continuous_usage_stats: bool = False  # usage so far in every chunk
    include_obfuscation: bool = False  # OpenAI's padding against listeners; of no effect here


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: Any = None
    description: Any = None
    strict: Any = None  # it always is
    schema_: dict[str, Any] | bool = Field(alias="schema")


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class GenerationBody(Body):
    """What completions and chat completions share. None: the default."""

    model: StrictStr | None = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1, as 0: all
    min_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_COUNT)
    best_of: int | None = None  # refused, unless it is n: to choose among more than are sent is not supported
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None  # prefixes are reused between requests with the same one only
    return_token_ids: bool = False  # token ids of prompt and output beside the text

    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None

    # Of no effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # Refused, unless the value is one of `neutral`.
    logit_bias: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"logit_bias": (None, {})}

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate; None: the client leaves it open."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def held_by(self) -> str | None:
        """What the answer is held to, in words for an error; None: nothing."""
        return None if self.response_format is None or isinstance(self.response_format, TextFormat) else "a response_format"

    def check(self, *, max_n: int) -> None:
        """Raise RequestError for what Atoll cannot do."""
        if self.num_choices > max_n:
            raise RequestError(f"n {self.num_choices} is above {max_n}; ask for fewer, or raise the server's --max-n")
        if self.best_of not in (None, self.num_choices):
            raise RequestError(f"best_of {self.best_of} is not n {self.num_choices}, and all that is generated is sent; leave best_of out, or set n")
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options are given and stream is not true; leave them out, or stream")
        if self.held_by is not None and (self.min_tokens or self.ignore_eos):
            raise RequestError(f"min_tokens or ignore_eos is given beside {self.held_by}, which may have to end earlier; leave one of them out")
        for name, accepted in self.neutral.items():
            value = getattr(self, name)
            if value not in accepted:
                raise RequestError(f"{name} {str(value)[:80]!r} is not supported; leave it out")

    def sampling_params(self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> list[SamplingParams]:
        """One for each of n sequences, whose seeds differ. Raises RequestError for a value out of range."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(0, self.top_k) if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return [
            SamplingParams(max_tokens=max_tokens, ignore_eos=self.ignore_eos, seed=None if self.seed is None else _nth_seed(self.seed, choice), **options)
            for choice in range(self.num_choices)
        ]


class CompletionBody(GenerationBody):
    prompt: StrictStr | list[StrictStr] | TokenIds | list[TokenIds]
    echo: bool = False  # the prompt before its completion
    logprobs: int | None = None  # of that many most likely tokens
    suffix: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationBody.neutral, "suffix": (None, "")}

    @property
    def prompts(self) -> list[str | list[int]]:
        """A list of ints is one prompt."""
        many = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if many and isinstance(many[0], int):
            return [many]
        return cast(list[str | list[int]], many)

    def check(self, *, max_n: int) -> None:
        super().check(max_n=max_n)
        if not self.prompts:
            raise RequestError("prompt is an empty list; give text, token ids, or a list of either")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 is below 1; generate at least one token, or ask for an echo of the prompt")


class ContentPart(Body):
    type: Literal["text"]
    text: StrictStr


class CalledFunction(Body):
    name: StrictStr
    arguments: StrictStr  # a JSON object


class ToolCall(Body):
    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None  # of a stream's pieces, joined


class ChatMessage(Body):
    role: StrictStr
    content: StrictStr | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    # Of no effect: chat templates do not know them.
    name: Any = None
    tool_call_id: StrictStr | None = None
    # What an answer of OpenAI's holds beside them. Refused, unless empty.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content's text; empty for none, which chat templates take and null not."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(Body):
    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: no parameters
    strict: bool | None = None  # hold calls to the schema where the model is free not to call


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: StrictStr


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None, "none"),
        "chat_template_kwargs": (None, {}),
    }

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def offered_tools(self) -> list[Tool]:
        """Those that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def held_by(self) -> str | None:
        if self.must_call:
            return "a tool_choice"
        return "a strict tool" if any(tool.function.strict for tool in self.offered_tools) else super().held_by

    def check(self, *, max_n: int) -> None:
        super().check(max_n=max_n)
        self._check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(f"top_logprobs {self.top_logprobs} is given and logprobs is not true; set it, or leave top_logprobs out")
        if self.asked_tokens == 0:
            raise RequestError("max_tokens 0 is below 1; generate at least one token")

    def _check_tools(self) -> None:
        names: set[str] = set()
        for at, tool in enumerate(self.tools or ()):
            name = tool.function.name
            if not _TOOL_NAME.fullmatch(name):
                raise RequestError(f"tools.{at}.function.name {name[:80]!r} is not 1 to 64 of A-Z, a-z, 0-9, _ and -; rename it")
            if name in names:
                raise RequestError(f"tools.{at}.function.name {name!r} is the name of an earlier tool; rename one of them")
            names.add(name)
        if self.must_call and not self.tools:
            raise RequestError("tool_choice asks for a call, and tools is empty; give at least one tool, or leave tool_choice out")
        if isinstance(self.tool_choice, NamedTool) and (wanted := self.tool_choice.function.name) not in names:
            raise RequestError(f"tool_choice.function.name {wanted[:80]!r} is none of the tools; use one of {', '.join(sorted(names))}")
        if self.must_call and self.response_format is not None and not isinstance(self.response_format, TextFormat):
            raise RequestError("tool_choice asks for a call, and response_format for an answer of another form; leave one of them out")


class TokenizeBody(Body):
    """Text or messages, one of them."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True  # around `prompt`
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: StrictStr | None = None
    tokens: TokenIds


def _nth_seed(seed: int, choice: int) -> int:
    return (seed + choice) % (MAX_SEED + 1) if 0 <= seed <= MAX_SEED else seed
