"""What may limit a request's next token beside its sampling parameters: a grammar, say; knows no logits and no grammar."""

from typing import Protocol


class Constraint(Protocol):
    """Of one sequence; moves along with its tokens."""

    def mask(self) -> bytes:
        """The tokens that may come next: bit `token_id % 32` of the little-endian 32-bit word `token_id // 32`, for the whole vocabulary."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by a token; False: it may not come here."""
        ...
