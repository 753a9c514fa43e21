"""Log probabilities as OpenAI's two formats have them; knows no request."""

import math
from collections.abc import Sequence
from typing import Any

from atoll.engine.output import TokenLogprobs
from atoll.models.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; one that is no whole character is spelled `bytes:\\xe2\\x82`, so that no two tokens look alike for being cut."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float | None:
    """JSON has no infinity and no NaN: an impossible token has OpenAI's -9999."""
    return None if math.isnan(logprob) else max(logprob, IMPOSSIBLE)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`{"content": [...]}`, one entry per token."""
    return {
        "content": [
            _chat_entry(tokenizer, token.token_id, token.logprob)
            | {"top_logprobs": [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in token.top]}
            for token in tokens
        ]
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token_id), "logprob": _number(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


class CompletionLogprobs:
    """The four parallel lists of a completion, whole or chunk by chunk: offsets count characters from the start of the text that is returned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def take(self, tokens: Sequence[TokenLogprobs | int]) -> dict[str, Any]:
        """The lists for the next tokens; an id alone is a token that nothing came before, so that it has no probability."""
        taken: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            token_id = token if isinstance(token, int) else token.token_id
            taken["text_offset"].append(self._offset)
            taken["tokens"].append(token_text(self._tokenizer, token_id))
            taken["token_logprobs"].append(None if isinstance(token, int) else _number(token.logprob))
            taken["top_logprobs"].append(None if isinstance(token, int) else self._top(token))
            self._offset += len(self._detokenizer.push(token_id))
        return taken

    def _top(self, token: TokenLogprobs) -> dict[str, float | None]:
        """The most likely tokens, and the one that was chosen."""
        return {token_text(self._tokenizer, token_id): _number(logprob) for token_id, logprob in (*token.top, (token.token_id, token.logprob))}
