"""Token ids to text one at a time: bytes of a character that is not complete yet wait for the next token.

A token is turned into its bytes and these go through an incremental UTF-8 decoder, so that a step costs the same after ten thousand tokens as after ten,
and a U+FFFD that the model really writes is not mistaken for half a character.
"""

import codecs
import re
from collections.abc import Callable
from typing import Any

from atoll.errors import ModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "▁"  # SentencePiece's space


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte, reversed: printable Latin-1 stands for itself, the rest is numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class PieceDecoder:
    """The bytes behind a vocabulary entry, for the two families of vocabularies that Llama models have.

    `state` is the tokenizers library's description of its decoder.
    Raises ModelError for another than byte-level BPE, or SentencePiece with or without byte fallback.
    """

    def __init__(self, state: dict[str, Any] | None) -> None:
        steps = _flatten(state)
        kinds = {step["type"] for step in steps}
        self.is_byte_level = kinds == {"ByteLevel"}
        self.strips_first_space = False
        if self.is_byte_level:
            return
        unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        replaced = {(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"}
        if unknown or not steps or replaced - {(_SPACE_PIECE, " ")}:
            found = ", ".join(sorted(kinds)) or "none"
            raise ModelError(
                f"the tokenizer's decoder ({found}) is not supported; supported: byte-level BPE, SentencePiece (Replace, ByteFallback, Fuse, Strip)"
            )
        self.has_byte_pieces = "ByteFallback" in kinds
        self.strips_first_space = any(
            (step["type"] == "Strip" and step["start"] == 1) or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never") for step in steps
        )

    def piece_bytes(self, piece: str) -> bytes:
        if self.is_byte_level:
            known = [_ALPHABET.get(char) for char in piece]
            # An added token may be plain text outside the alphabet: then it stands for itself.
            return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
        match = _BYTE_PIECE.fullmatch(piece) if self.has_byte_pieces else None
        return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE_PIECE, " ").encode()


class Detokenizer:
    """One sequence's text as it grows. The pieces of `push` and the last one of `finish`, joined, are the decoded text.

    Bytes that can never become UTF-8 come out as U+FFFD, one for each cut-off character, as soon as that is certain.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped_ids: frozenset[int], *, strips_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._strips_space = strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete now and was not before; often empty inside an emoji."""
        if token_id in self._skipped_ids:
            return ""
        data = self._token_bytes(token_id)
        if self._strips_space:
            data = data.removeprefix(b" ")
            self._strips_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end of the sequence: U+FFFD for a character cut in half, else nothing."""
        return self._decoder.decode(b"", final=True)


def _flatten(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    if state is None:
        return []
    if state["type"] == "Sequence":
        return [step for part in state["decoders"] for step in _flatten(part)]
    return [state]
