"""When a slow worker's copies are made, and which of its spans arrive."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from atoll.offload.base import BlobKind, Transfer

if TYPE_CHECKING:
    from tests.offload.slow import SlowWorker

Pace = Callable[["SlowWorker", bool], None]  # called at each poll (True) and at the end of each run (False); advances flights
Outcome = Callable[[Transfer, bool], Sequence[bool]]  # of a transfer, True for a load: which of its spans arrive


# Paces


def at_once(worker: "SlowWorker", is_poll: bool) -> None:
    for flight in [*worker.flights]:
        worker.advance(flight)


def never(worker: "SlowWorker", is_poll: bool) -> None:
    """The test advances by itself."""


def after_polls(count: int) -> Pace:
    """All of a transfer at its poll number `count`, counted from 1."""

    def pace(worker: "SlowWorker", is_poll: bool) -> None:
        for flight in [*worker.flights]:
            if flight.num_polls >= count:
                worker.advance(flight)

    return pace


def a_copy_a_poll(worker: "SlowWorker", is_poll: bool) -> None:
    for flight in [*worker.flights] if is_poll else ():
        worker.advance(flight, 1)


def backwards(worker: "SlowWorker", is_poll: bool) -> None:
    """At each poll the transfer that began last, from its last page to its first."""
    waiting = [flight for flight in worker.flights if flight.copies]
    if is_poll and waiting:
        worker.advance(waiting[-1], backwards=True)


def at_random(random: Random) -> Pace:
    def pace(worker: "SlowWorker", is_poll: bool) -> None:
        for flight in random.sample(worker.flights, len(worker.flights)):
            if random.random() < 0.5:
                worker.advance(flight, random.randint(0, 4), backwards=random.random() < 0.5)

    return pace


# Outcomes


def all_arrives(transfer: Transfer, is_load: bool) -> list[bool]:
    return [True] * len(transfer.spans)


def loads_fail(transfer: Transfer, is_load: bool) -> list[bool]:
    return [not is_load] * len(transfer.spans)


def half_of_each_load(transfer: Transfer, is_load: bool) -> list[bool]:
    """The first half of its KV pages, and the state."""
    num_kv = sum(span.kind is BlobKind.KV for span in transfer.spans)
    return [not is_load or span.kind is BlobKind.STATE or number < num_kv // 2 for number, span in enumerate(transfer.spans)]


def states_fail(transfer: Transfer, is_load: bool) -> list[bool]:
    return [not is_load or span.kind is BlobKind.KV for span in transfer.spans]


def stores_fail(transfer: Transfer, is_load: bool) -> list[bool]:
    return [is_load] * len(transfer.spans)
