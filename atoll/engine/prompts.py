"""Prompts and conversations as callers give them: checked, and turned into token ids; knows no engine."""

from typing import Any

from atoll.engine.sampling import SamplingParams
from atoll.engine.text import Tokenizer
from atoll.errors import RequestError

Message = dict[str, Any]

MESSAGE_EXAMPLE = '{"role": "user", "content": "Hello"}'


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a plain prompt; an empty one is a beginning-of-sequence token, where the model has one. Raises RequestError for text that is no text."""
    check_text("prompt", text)
    token_ids = tokenizer.encode(text)
    return [tokenizer.bos_token_id] if not token_ids and tokenizer.bos_token_id is not None else token_ids


def encode_conversation(tokenizer: Tokenizer, conversation: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Token ids of messages through the model's chat template, ready for the answer. Raises RequestError for what is no conversation."""
    if not isinstance(conversation, list) or not conversation:
        raise RequestError(f"conversation {conversation!r} is not a list of messages; give at least one like {MESSAGE_EXAMPLE}")
    for message in conversation:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RequestError(f"message {message!r} has no role and content as text; give one like {MESSAGE_EXAMPLE}")
        for key in ("role", "content"):
            check_text("message", message[key])
    return tokenizer.apply_chat_template(conversation, tools=tools)


def check_text(name: str, text: str) -> None:
    """Raise RequestError for a string that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} {text[:40]!r} holds half of a surrogate pair, which is no text; decode its bytes as UTF-8 with errors='replace'") from error


def check_request(token_ids: list[int], params: SamplingParams, cache_salt: str | None, *, max_model_len: int, vocab_size: int) -> None:
    """Raise RequestError for a prompt that an engine of these limits cannot take."""
    if not token_ids:
        raise RequestError("the prompt has 0 tokens, 1 is the least; give some text")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, at most {max_model_len - 1} leave room for one more within max_model_len {max_model_len}; "
            "shorten it, or raise max_model_len (or num_pages, where the pool is what limits it) up to the model's positions"
        )
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id!r} is outside the vocabulary's 0 to {vocab_size - 1}; use ids of this model's tokenizer")
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise RequestError(f"stop token id {token_id} is outside the vocabulary's 0 to {vocab_size - 1}; use ids of this model's tokenizer")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt {cache_salt!r} is not a non-empty string; give one, or None to share prefixes with all who give none")
