"""What the server answers, as pydantic models for the description of the API; answers are made without them, as plain data."""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | int


class Error(BaseModel):
    error: ErrorDetail


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    id: str
    object: str
    created: int  # seconds since 1970
    owned_by: str
    max_model_len: int  # tokens


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class TokenList(BaseModel):
    count: int
    max_model_len: int  # tokens
    tokens: list[int]
    token_strs: list[str] | None = None  # where they were asked for


class Text(BaseModel):
    prompt: str


class PromptDetails(BaseModel):
    cached_tokens: int
    fetched_tokens: int  # of these, brought back from a tier


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Choice(BaseModel):
    index: int
    finish_reason: str | None
    stop_reason: str | int | None  # the stop text or stop token that ended it
    prompt_token_ids: list[int] | None = None  # where they were asked for, as token_ids
    token_ids: list[int] | None = None


class TokenLists(BaseModel):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class CompletionChoice(Choice):
    text: str
    logprobs: TokenLists | None


class Message(BaseModel):
    role: str
    content: str | None


class Candidate(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(Candidate):
    top_logprobs: list[Candidate]


class ChatTokens(BaseModel):
    content: list[ChatToken]


class ChatChoice(Choice):
    message: Message
    logprobs: ChatTokens | None


class Answer(BaseModel):
    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    usage: Usage


class Completion(Answer):
    choices: list[CompletionChoice]


class ChatCompletion(Answer):
    choices: list[ChatChoice]


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


class Pool(BaseModel):
    pages: str  # a letter for each
    num_generated: int
