"""Text to token ids and back, and chat templates; the vocabulary work is the tokenizers library's."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from atoll.errors import ModelError, RequestError
from atoll.models.detokenizer import Detokenizer, PieceDecoder
from atoll.models.json_file import read_json

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as in OpenAI's API


class Tokenizer:
    """One model's vocabulary. Token ids go in and come out as plain lists of int.

    `role_tokens` names the tokens that a chat template may mention: bos_token, eos_token, and so on.
    """

    def __init__(self, backend: Backend, eos_token_ids: tuple[int, ...], role_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self._backend = backend
        self.role_tokens = dict(role_tokens)
        self.chat_template = chat_template
        self.bos_token_id = self._role_id("bos_token")
        own_eos = self._role_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = eos_token_ids or (() if own_eos is None else (own_eos,))
        self.special_token_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        # The library's decoder objects do not tell what they are made of; their pickled state does.
        self._pieces = PieceDecoder(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the specials that the model expects around a plain text; a BOS that the text spells out already is not doubled."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text; empty for an id outside the vocabulary (models pad theirs)."""
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._pieces.piece_bytes(piece)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one per sequence."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(self.token_bytes, skipped, strips_first_space=self._pieces.strips_first_space)

    def apply_chat_template(self, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; a template that knows no tools ignores `tools`.

        Raises ModelError for a model without a template, RequestError for messages that its template refuses.
        """
        if self.chat_template is None:
            raise ModelError("the model has no chat template; send plain prompts, or use a model tuned for chat")
        # Imported here: a second that plain prompts can do without.
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = {**self.role_tokens, "add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            rendered: Any = render_jinja_template([[dict(message) for message in messages]], chat_template=self.chat_template, **names)
        # The last two: a template that takes a field for granted, or of another type.
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses the conversation: {error}; each message needs a role and content it knows") from error
        # The template writes the special tokens itself.
        return self.encode(rendered[0][0], add_special_tokens=False)

    def _role_id(self, role: str) -> int | None:
        return self._backend.token_to_id(self.role_tokens[role]) if role in self.role_tokens else None


def tokenizer_from_folder(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """From a Hugging Face folder's tokenizer.json and what lies beside it. Raises ModelError when it is missing or damaged."""
    # Imported here: a second that GGUF files can do without.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read_json(folder / "tokenizer.json")
    try:
        fast = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        template = fast.get_chat_template() if fast.chat_template else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}; fetch the folder again") from error
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer in {folder} is a {type(fast).__name__}; only those of the tokenizers library (tokenizer.json) are supported")
    roles = {role: token for role, token in fast.special_tokens_map.items() if isinstance(token, str)}
    return Tokenizer(fast.backend_tokenizer, eos_token_ids, roles, template)
