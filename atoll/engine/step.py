"""One step's work as plain data: no tensors, no behaviour, so the same message could drive a runner in another process."""

from dataclasses import dataclass, field

from atoll.engine.sampling import SamplingParams
from atoll.offload.base import NO_METADATA, Metadata


@dataclass(frozen=True, slots=True)
class SampleTask:
    """How to choose the token that follows a row."""

    params: SamplingParams
    seed: int
    index: int  # tokens the request has generated so far; with the seed it names the random number
    suppressed: tuple[int, ...] = ()  # token ids that may not be chosen
    counts: tuple[tuple[int, int], ...] = ()  # what penalties act on: token ids and how often each was generated, 0 for those of the prompt alone
    allowed: bytes | None = None  # of all token ids, those that may be chosen, as atoll.engine.constraint.Constraint.mask; None: all


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Tokens whose log probabilities are wanted: `targets[i]` follows the row's token `i`."""

    targets: list[int]
    num_top: int  # most likely tokens told beside each


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's tokens in this step."""

    request_id: int
    start: int  # position of the first token
    token_ids: list[int]
    pages: list[int]  # the sequence's pages, as many as its rows up to this step's last token need
    sample: SampleTask | None  # None: a chunk that does not reach the sequence's end
    state_slot: int | None = None  # where the sequence's state lies; None: the model keeps none
    score: ScoreTask | None = None  # None: nothing is asked about the prompt's own tokens


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A whole state between its slot and the pages of an image."""

    state_slot: int
    pages: tuple[int, ...]  # the image's pages, in order


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one token (`decodes`) and of more (`prefills`), in the order in which they lie in the batch; and what is done to pages and slots around them.

    The order is clears, the fence behind which transfers start, restores, rows, saves. A step may hold clears, transfers and copies alone.
    """

    decodes: list[StepRow] = field(default_factory=list)
    prefills: list[StepRow] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)  # request ids that gave their pages back
    # Pages to zero before anything of this step reads or writes (the guard; none when off), and what a connector's worker starts behind that.
    metadata: Metadata = NO_METADATA
    restores: list[StateCopy] = field(default_factory=list)  # image -> slot, before the forward pass
    saves: list[StateCopy] = field(default_factory=list)  # slot -> image, after the forward pass: the slot then holds exactly the image's position

    @property
    def rows(self) -> list[StepRow]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.prefills)
