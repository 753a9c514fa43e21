"""Prompts and conversations as callers give them: checked, and turned into token ids; knows no engine."""

from typing import Any

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
