"""What every page is for, in one letter each, kept as pages change: a picture of the whole pool is then one copy; knows no holder."""

from collections import Counter

# The page classes, and apart from other kv pages those that the prefix cache has named.
LETTERS = {"null": "0", "free": ".", "kv": "k", "indexed": "x", "image": "i", "leased": "l"}
_CODES = {kind: ord(letter) for kind, letter in LETTERS.items()}
_KINDS = {code: kind for kind, code in _CODES.items()}


class PageMap:
    """Written by the ledger, and by the prefix cache where it names a page. A mark is O(1); `text` copies one byte per page."""

    def __init__(self, num_pages: int) -> None:
        self._codes = bytearray(LETTERS["free"].encode() * num_pages)
        self.mark(0, "null")

    def mark(self, page: int, kind: str) -> None:
        self._codes[page] = _CODES[kind]

    def kind(self, page: int) -> str:
        return _KINDS[self._codes[page]]

    def text(self) -> str:
        """One letter of LETTERS for each page, in order."""
        return self._codes.decode("ascii")


def count_kinds(text: str) -> Counter[str]:
    """Pages by kind, of a map's text; a kind without pages counts 0."""
    return Counter({kind: text.count(letter) for kind, letter in LETTERS.items()})
