"""A checkpoint: a state kept at a boundary as a page image, from the reservation of its pages to its eviction; knows no tensor and no request."""

from dataclasses import dataclass

from atoll.kv.eviction import Stamp


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The state after `position` tokens of the prefix named `digest`, laid over `pages`.

    Its life: pages reserved as a step is scheduled; the state copied by that step, right after its forward pass, while the slot holds exactly this position;
    published as the step is committed, and only then seen by a match; pinned from the scheduling of a restore to its commit; dropped whole. One that is
    cancelled before its commit was never seen by anybody.
    """

    digest: bytes  # of the page that ends at the boundary
    position: int  # tokens
    pages: tuple[int, ...]
    is_published: bool = False
    num_pins: int = 0  # restores that are scheduled and not committed
    num_hits: int = 0  # restores by other requests than the one that left it
    stamp: Stamp = (0.0, 0)  # of its last use
