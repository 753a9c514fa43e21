"""The connector protocol, its scheduler side and its data: what leaves the pool and comes back, in which order; knows no tensor, no tier and no model.

A connector keeps blobs: the bytes of one KV page, or of one state's image, named by the digest that the prefix cache names the page with. Its two sides share
nothing but `Metadata` (scheduler side to worker) and `Completion` (back), both plain data, so the sides may live in different processes and one scheduler
side may drive many workers (`atoll.offload.ranks` joins what they report).

The contract; "the engine" is whoever calls.

1. *A store reads only what is written.* A page is offered in the step after the one that filled it, and the worker reads it behind that step's fence.
2. *A load starts behind the fence.* The fence lies behind every clear and all compute work issued so far; no byte of a target page is written before it.
3. *A completion is visible only after the device event.* What `TransferWorker.poll` tells has happened; work issued later reads the loaded bytes.
4. *A page in flight is leased*: neither allocatable nor clearable, from `after_allocation` or `prepare_store` until the completion of its generation,
   whatever becomes of the request: an abort or a preemption only takes away the wish, never the lease.
5. *Clears ride on the first metadata that can start a load*, batch or no batch: `build_metadata` takes all that are pending, and the worker's side issues them
   before it records the fence.
6. *A failed state is a shorter prefix.* Of a load that failed in part, the leading KV pages are kept that arrived, and a state only if it arrived and every
   page before it did; the request goes on from the deepest boundary where both are good, and computes the rest.
7. *Over ranks, one failure is everybody's miss.*

Failure is data: a `Completion` says which spans arrived and why the others did not. No method but the constructors raises for what a tier, a disk or a thread
may do. Each transfer has a generation of its own, never used again: the engine's are above 0, a connector's own (between its tiers) below. A completion of
an unknown generation is ignored. Pairs: every transfer that `after_allocation` or `prepare_store` accepted ends in exactly one completion, or in a `cancel`
that returned True.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol


class BlobKind(StrEnum):
    """States have a namespace of their own: the same digest names a page and the state at its end."""

    KV = "kv"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Span:
    """A blob, and where it lies in the pool."""

    kind: BlobKind
    digest: bytes
    pages: tuple[int, ...]  # one KV page, or an image's pages in order


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blobs that move together, one way."""

    generation: int
    spans: tuple[Span, ...]  # of a load: KV pages in the order of the sequence, then the state, if any
    note: object = None  # the connector's own, plain data for its worker: where the blobs lie on its side

    @property
    def pages(self) -> list[int]:
        return [page for span in self.spans for page in span.pages]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a worker does around one step, which may have no forward pass."""

    fence: int  # number of the step; its fence is recorded behind the clears and whatever was issued before
    clears: tuple[int, ...] = ()  # pages that are zeroed on the compute stream before the fence
    loads: tuple[Transfer, ...] = ()
    stores: tuple[Transfer, ...] = ()
    note: object = None  # the connector's own, plain data for its worker

    @property
    def moves(self) -> bool:
        """Whether there is anything for the worker."""
        return bool(self.loads or self.stores or self.note is not None)


NO_METADATA = Metadata(fence=0)


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer has ended; nothing reads or writes its pages on its behalf any more."""

    generation: int
    arrived: tuple[bool, ...]  # for each span of the transfer
    seconds: float = 0.0  # from its start to its end
    num_bytes: int = 0  # that arrived
    error: str | None = None  # why the others did not; None: all arrived

    @property
    def ok(self) -> bool:
        return all(self.arrived)


@dataclass(frozen=True, slots=True)
class Found:
    """What a connector has of a sequence."""

    num_pages: int = 0  # leading ones of those that were asked for
    states: frozenset[int] = frozenset()  # pages from the sequence's beginning to each state that is there


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier since the start."""

    name: str  # host, disk, or the connector's own
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_blobs: int = 0
    num_evicted: int = 0  # blobs
    num_failures: int = 0  # operations
    is_suspect: bool = False  # it does not answer, and is tried only now and then


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """All transfers since the start."""

    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    num_load_failures: int = 0  # transfers of which a part did not arrive
    num_store_failures: int = 0
    tiers: tuple[TierStats, ...] = ()

    def with_load(self, ended: Completion) -> "ConnectorStats":
        """One load more."""
        return replace(
            self,
            loaded_bytes=self.loaded_bytes + ended.num_bytes,
            loaded_seconds=self.loaded_seconds + ended.seconds,
            num_load_failures=self.num_load_failures + (not ended.ok),
        )

    def with_store(self, ended: Completion) -> "ConnectorStats":
        """One store more."""
        return replace(
            self,
            stored_bytes=self.stored_bytes + ended.num_bytes,
            stored_seconds=self.stored_seconds + ended.seconds,
            num_store_failures=self.num_store_failures + (not ended.ok),
        )


class Connector(Protocol):
    """The scheduler side. Called by one thread, between steps; nothing here waits for a device or a disk."""

    def lookup(self, digests: Sequence[bytes], first: int) -> Found:
        """What is there of the pages that `digests` name, from number `first` on, and the states at the ends of all pages as far as these reach, or further.

        Changes nothing but what was used last.
        """
        ...

    def after_allocation(self, load: Transfer) -> bool:
        """The load's pages are allocated and leased: take it on, so that its blobs stay until it has ended. False: they are gone, and no page is touched."""
        ...

    def prepare_store(self, store: Transfer) -> Transfer | None:
        """What the connector takes of the blobs on offer, perhaps less; None: nothing (it has them all, or no room).

        Offered as they are written, and all of a request's once more when it ends: those that are here, or on their way, are not taken again.
        """
        ...

    def build_metadata(self, fence: int, clears: Sequence[int]) -> Metadata:
        """Everything accepted since the last call, and every clear that is pending. Called once a step, also for steps without rows."""
        ...

    def complete(self, completions: Sequence[Completion]) -> list[Completion]:
        """Take the workers' reports; those of the engine's transfers that have ended by now, each once."""
        ...

    def request_finished(self, digests: Sequence[bytes], generations: Sequence[int]) -> bool:
        """A request ended or was preempted; `generations` of its stores have not ended. True: a lease, the request's pages stay until all of them have.

        False only if none of them will read a page any more; `digests` names the request's pages, for the order of eviction.
        """
        ...

    def cancel(self, generation: int) -> bool:
        """Nobody waits for a transfer any more. True: it had not begun and never will, its pages are free now; False: they stay leased until it completes."""
        ...

    def forget(self, digests: Sequence[bytes]) -> None:
        """Drop the blobs of these pages, whatever their state: something was wrong with what computed them."""
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether another `build_metadata` or `complete` is due, though no request needs one."""
        ...

    def reset(self) -> None:
        """Forget every blob but those of the engine's transfers that have not ended."""
        ...

    @property
    def stats(self) -> ConnectorStats: ...
