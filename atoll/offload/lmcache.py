"""The connector to LMCache, its scheduler side: which blobs LMCache was given and still has, and what is in flight; knows no tensor.

LMCache evicts when it likes and tells nobody. So what it was given is looked up in LMCache each time, what a load will read is pinned there from
`after_allocation` until the load has ended, and a blob that is gone all the same is a load that failed.

What is dropped here begins a new epoch, which is part of LMCache's names: nothing stored before can be read under a name given after, though LMCache may still
be writing it to disk.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.offload.base import BlobKind, Completion, ConnectorStats, Found, Metadata, Span, Transfer

if TYPE_CHECKING:
    import torch

    from atoll.offload.base_worker import Offload
    from atoll.offload.lmcache_store import Held, Key, LMCacheStore

Blob = tuple[BlobKind, bytes]


@dataclass(slots=True)
class _Load:
    transfer: Transfer
    held: "list[Held]"


@dataclass(slots=True)
class _Store:
    transfer: Transfer
    wanted: set[Blob]  # less those that were forgotten meanwhile


def make_lmcache(config_path: str | None, namespace: str, device: "torch.device") -> "Offload":
    """Both sides around one LMCache.

    `config_path`: its YAML file; none: its defaults. `namespace`: one for all who may read each other's blobs, in letters that LMCache may make a file's name
    of. `device`: of the pool. Raises ConfigError without LMCache, and for a configuration that it, or this connector, cannot use.
    """
    from atoll.offload.base_worker import Offload
    from atoll.offload.lmcache_store import LMCacheStore
    from atoll.offload.lmcache_worker import LMCacheWorker

    store = LMCacheStore(config_path or None, namespace, device)
    return Offload(LMCacheConnector(store), LMCacheWorker(store))


class LMCacheConnector:
    """`Transfer.note` is LMCache's name of each span."""

    def __init__(self, store: "LMCacheStore") -> None:
        self._store = store
        self._epoch = 0
        self._known: OrderedDict[Blob, Key] = OrderedDict()  # what LMCache was given, and under which name
        self._loads: dict[int, _Load] = {}  # by generation, until they have ended
        self._stores: dict[int, _Store] = {}
        self._storing: set[Blob] = set()
        self._new_loads: list[Transfer] = []
        self._new_stores: list[Transfer] = []
        self._num_gone = 0
        self._stats = ConnectorStats()

    def lookup(self, digests: Sequence[bytes], first: int) -> Found:
        num_pages = 0
        for digest in digests[first:]:
            if not self._has((BlobKind.KV, digest)):
                break
            num_pages += 1
        states = frozenset(i for i, digest in enumerate(digests, 1) if self._has((BlobKind.STATE, digest)))
        return Found(num_pages, states)

    def after_allocation(self, load: Transfer) -> bool:
        names = tuple(self._known.get(_blob(span)) or self._name(span) for span in load.spans)
        held = self._store.hold(names)
        if not held:
            return False
        load = replace(load, note=names)
        self._loads[load.generation] = _Load(load, held)
        self._new_loads.append(load)
        return True

    def prepare_store(self, store: Transfer) -> Transfer | None:
        spans = tuple(span for span in store.spans if _blob(span) not in self._storing and not self._has(_blob(span)))
        if not spans:
            return None
        taken = Transfer(store.generation, spans, tuple(self._name(span) for span in spans))
        blobs = {_blob(span) for span in spans}
        self._storing |= blobs
        self._stores[taken.generation] = _Store(taken, blobs)
        self._new_stores.append(taken)
        return taken

    def build_metadata(self, fence: int, clears: Sequence[int]) -> Metadata:
        metadata = Metadata(fence, tuple(clears), tuple(self._new_loads), tuple(self._new_stores))
        self._new_loads, self._new_stores = [], []
        return metadata

    def complete(self, completions: Sequence[Completion]) -> list[Completion]:
        ended = []
        for completion in completions:
            if load := self._loads.pop(completion.generation, None):
                self._end_load(load, completion)
            elif store := self._stores.pop(completion.generation, None):
                self._end_store(store, completion)
            else:
                continue
            ended.append(completion)
        return ended

    def _end_load(self, load: _Load, completion: Completion) -> None:
        self._store.let_go(load.held)
        if not completion.ok:
            self._epoch += 1
        for span, name, arrived in zip(load.transfer.spans, names_of(load.transfer), completion.arrived, strict=True):
            if not arrived:
                # Gone, or not what was put: either way nobody shall be promised it again, and what is computed instead is stored anew.
                self._drop(_blob(span), name)
        self._stats = self._stats.with_load(completion)

    def _end_store(self, store: _Store, completion: Completion) -> None:
        for span, name, arrived in zip(store.transfer.spans, names_of(store.transfer), completion.arrived, strict=True):
            blob = _blob(span)
            if blob not in store.wanted:
                self._store.drop(name)
            else:
                self._storing.discard(blob)
                if arrived:
                    self._known[blob] = name
                    self._sweep()
        self._stats = self._stats.with_store(completion)

    def request_finished(self, digests: Sequence[bytes], generations: Sequence[int]) -> bool:
        blobs = ((kind, digest) for digest in digests for kind in BlobKind)
        self._store.touch(self._known[blob] for blob in blobs if blob in self._known)
        return any(generation in self._stores for generation in generations)

    def cancel(self, generation: int) -> bool:
        num_new = len(self._new_loads) + len(self._new_stores)
        self._new_loads = [load for load in self._new_loads if load.generation != generation]
        self._new_stores = [store for store in self._new_stores if store.generation != generation]
        if len(self._new_loads) + len(self._new_stores) == num_new:
            return False
        if load := self._loads.pop(generation, None):
            self._store.let_go(load.held)
        if store := self._stores.pop(generation, None):
            self._storing -= store.wanted
        return True

    def forget(self, digests: Sequence[bytes]) -> None:
        self._forget([(kind, digest) for digest in digests for kind in BlobKind])

    def reset(self) -> None:
        loading = {_blob(span) for load in self._loads.values() for span in load.transfer.spans}
        self._forget(self._known.keys() - self._storing - loading)

    def _forget(self, blobs: Iterable[Blob]) -> None:
        self._epoch += 1
        gone = set(blobs)
        for blob in gone & self._known.keys():
            self._drop(blob, self._known[blob])
        for store in self._stores.values():
            store.wanted -= gone
        self._storing -= gone

    @property
    def has_pending_work(self) -> bool:
        return bool(self._loads or self._stores)

    @property
    def stats(self) -> ConnectorStats:
        return replace(self._stats, tiers=self._store.tiers(self._num_gone, self._stats.num_load_failures + self._stats.num_store_failures))

    def _has(self, blob: Blob) -> bool:
        name = self._known.get(blob)
        if name is None:
            return False
        if self._store.has(name):
            return True
        del self._known[blob]
        self._num_gone += 1
        return False

    def _sweep(self) -> None:
        """Look after two of what is known longest, so that what LMCache has evicted does not pile up here."""
        for _ in range(2):
            blob = next(iter(self._known))
            if self._has(blob):
                self._known.move_to_end(blob)

    def _drop(self, blob: Blob, name: "Key") -> None:
        if self._known.get(blob) == name:
            del self._known[blob]
        self._store.drop(name)

    def _name(self, span: Span) -> "Key":
        return self._store.key(span.kind, span.digest, self._epoch)


def _blob(span: Span) -> Blob:
    return span.kind, span.digest


def names_of(transfer: Transfer) -> "tuple[Key, ...]":
    assert isinstance(transfer.note, tuple)
    return transfer.note
