"""Characters that have no business in an answer: letters of scripts that its prompt does not use, and what no text holds."""

import unicodedata

# Categories of what no text holds: controls, private use, unassigned, halves of surrogate pairs.
_NO_TEXT = ("Cc", "Co", "Cn", "Cs")
_WHITE = "\n\r\t"


def foreign_characters(text: str, prompt: str) -> str:
    """The characters of `text`, each once and in order, that are garbage after `prompt`.

    A letter belongs to the script that its Unicode name begins with (LATIN, GREEK, CJK, ...), once written in its compatible form; what the prompt uses, and
    Latin, is at home. Digits, marks and signs belong nowhere and are let pass. U+FFFD, controls and unassigned code points are garbage unless the prompt has
    them.
    """
    at_home = {"LATIN"} | {script for char in set(prompt) if (script := _script(char))}
    garbage = (char for char in dict.fromkeys(text) if _is_no_text(char) or (_script(char) or "LATIN") not in at_home)
    return "".join(char for char in garbage if char not in prompt)


def _script(char: str) -> str | None:
    """The script of a letter; None: no letter."""
    letter = unicodedata.normalize("NFKC", char)[:1]
    return unicodedata.name(letter, "?").split()[0] if unicodedata.category(letter).startswith("L") else None


def _is_no_text(char: str) -> bool:
    return char == "\ufffd" or (char not in _WHITE and unicodedata.category(char) in _NO_TEXT)
