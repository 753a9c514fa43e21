"""LMCache's in-process storage as a place for blobs: keys, memory, checksums of what comes from disk. The one module that imports lmcache; knows no transfer.

Its storage level is used, not its engine: the engine cuts tokens into pieces and names them itself, while here the prefix cache has named the page, which is
one span of bytes for all layers already. Of the backends two are taken, memory and disk. Both answer from a table in this process, so a lookup waits for
nothing; every other one asks a network or a device, in the middle of the engine's step, and is refused.

What LMCache does not do is done here. A file that is shorter than it was, or another's, is read as if it were whole, so blobs from disk carry a checksum, and
only what it fits comes into LMCache's memory again. A read from disk waits without end where the memory is full of what cannot be evicted, so room is asked
for first. Its threads would keep a process alive that was not closed, so they are started by a daemon. Its disk is closed before the memory it writes from.
"""

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from atoll.errors import ConfigError
from atoll.offload.base import BlobKind, TierStats

try:
    import xxhash
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.pin_monitor import PinMonitor
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy
    from lmcache.v1.storage_backend.storage_manager import StorageManager
    from yaml import YAMLError
except ImportError as missing:
    raise ConfigError(f"offload lmcache needs packages that are not installed ({missing}); install atoll[lmcache], or give host:8GiB") from missing

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
CHECKSUM_BYTES = 8
# LMCache aligns its memory to this, and reads around the operating system's cache only what is a multiple of it.
ALIGN_BYTES = 4096
# Options, some of them under extra_config, that bring a backend which asks a network or a device.
_REFUSED = ("remote_url", "remote_storage_plugins", "storage_plugins", "gds_path", "maru_path", "enable_p2p", "enable_pd", "enable_nixl_storage")

Key = Any  # a CacheEngineKey; LMCache has no types to check against
Memory = Any  # a MemoryObj
Held = tuple[Key, Any]  # a blob that is pinned, and LMCache's backend where it is


class LMCacheStore:
    """One LMCache in this process, which both sides of the connector share."""

    def __init__(self, config_path: str | None, namespace: str, device: torch.device | None = None) -> None:
        """`config_path`: LMCache's YAML file; None: its defaults. `device`: of the pool, for which LMCache pins its memory."""
        self._config = _read_config(config_path)
        self._namespace = namespace
        self._checks = bool(self._config.local_disk)
        self._manager = _make_manager(self._config, namespace, device)
        backends = self._manager.storage_backends
        self._cpu, self._disk = backends[CPU], backends.get(DISK)
        self._backends = [backend for backend in (self._cpu, self._disk) if backend is not None]
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """Of its memory."""
        return int(self._config.max_local_cpu_size * 2**30)

    def key(self, kind: BlobKind, digest: bytes, epoch: int) -> Key:
        """LMCache's name of a blob. Kinds and epochs have namespaces of their own, so that a state is never read as the page of its digest."""
        return CacheEngineKey(f"atoll.{self._namespace}.{kind.value}.{epoch}", 1, 0, int.from_bytes(digest, "big"), torch.uint8)

    def has(self, key: Key) -> bool:
        return any(backend.contains(key) for backend in self._backends)

    def hold(self, keys: Iterable[Key]) -> list[Held]:
        """Pin blobs where they are, and use the first of them last, so that a prefix outlives what follows it. Those that were there, and where."""
        held: list[Held] = []
        for key in keys:
            for backend in self._backends:
                if backend.contains(key, pin=True):
                    held.append((key, backend))
                    break
        # A file that somebody deleted is dropped by the thread that reads it, between pin and touch; the order of eviction is a matter of speed only.
        with suppress(KeyError):
            for backend in self._backends:
                backend.touch_cache()
        return held

    def let_go(self, held: Iterable[Held]) -> None:
        for key, backend in held:
            backend.unpin(key)

    def touch(self, keys: Iterable[Key]) -> None:
        self.let_go(self.hold(keys))

    def drop(self, key: Key) -> None:
        """Forget a blob; whoever reads it at this moment keeps its memory."""
        self._cpu.remove(key)
        if self._disk is not None:
            # Its file may be gone already.
            with suppress(OSError):
                self._disk.remove(key)

    def allocate(self, num_bytes: int) -> Memory | None:
        """Memory for a blob, with what was used least evicted for it; None: nothing that may be evicted is left."""
        shape = torch.Size([1, 1, 1, self._stored_bytes(num_bytes)])
        return self._cpu.allocate(shape, torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False)

    def put(self, key: Key, memory: Memory, num_bytes: int) -> None:
        """Give filled memory to LMCache, which evicts it when it likes; the caller's hold ends."""
        try:
            if self._checks:
                data = _bytes_of(memory).numpy()
                data[num_bytes : num_bytes + CHECKSUM_BYTES] = np.frombuffer(_checksum(key, data[:num_bytes]), dtype=np.uint8)
            self._manager.batched_put([key], [memory])
        except BaseException:
            self.release(memory)
            raise

    def get(self, key: Key, num_bytes: int) -> Memory | None:
        """A blob's memory, held until the caller releases it; reads a file where it must. None: it is gone, is not what was put, or there is no room."""
        memory = self._cpu.get_blocking(key)
        if memory is not None or self._disk is None or not self._disk.contains(key):
            return memory
        room = self.allocate(num_bytes)
        if room is None:
            return None
        self.release(room)
        memory = self._disk.get_blocking(key)
        if memory is None:
            return None
        data = _bytes_of(memory).numpy()
        stored = data[num_bytes : num_bytes + CHECKSUM_BYTES].tobytes()
        if data.size != self._stored_bytes(num_bytes) or stored != _checksum(key, data[:num_bytes]):
            self.release(memory)
            return None
        self._cpu.submit_put_task(key, memory)
        return memory

    def release(self, memory: Memory) -> None:
        memory.ref_count_down()

    def data(self, memory: Memory, num_bytes: int) -> torch.Tensor:
        """A blob's bytes in LMCache's memory, [num_bytes] uint8; pinned where LMCache found a GPU."""
        return _bytes_of(memory)[:num_bytes]

    def tiers(self, num_gone: int, num_failures: int) -> tuple[TierStats, ...]:
        used_bytes = self._cpu.get_memory_allocator().pin_allocator.total_allocated_size
        tiers = [TierStats("lmcache cpu", used_bytes, self.capacity_bytes, len(self._cpu.hot_cache), num_gone, num_failures)]
        if self._disk is not None:
            tiers.append(TierStats("lmcache disk", int(self._disk.current_cache_size), int(self._disk.max_cache_size), len(self._disk.dict)))
        return tuple(tiers)

    def close(self) -> None:
        """Nothing may copy any more. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._disk is not None:
                self._manager.close_backend(DISK)
            self._manager.close()
            if not self._manager.thread.is_alive():
                _close_loop(self._manager.loop)

    def _stored_bytes(self, num_bytes: int) -> int:
        return -(-(num_bytes + CHECKSUM_BYTES) // ALIGN_BYTES) * ALIGN_BYTES if self._checks else num_bytes


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """LMCache stops its loop and leaves it open, with what waits in it."""

    async def end() -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    loop.run_until_complete(end())
    loop.close()


def _bytes_of(memory: Memory) -> torch.Tensor:
    return memory.tensor.view(-1)


def _checksum(key: Key, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes:
    """Of a blob's bytes under its name: another blob's, whole, do not pass for it."""
    return xxhash.xxh3_64_digest(data.data, seed=xxhash.xxh3_64_intdigest(key.to_string().encode()))


def _read_config(path: str | None) -> Any:
    """Raises ConfigError for a file that cannot be read and for backends that would make lookups wait."""
    where = f"offload lmcache{'' if path is None else ':' + path}"
    try:
        config = LMCacheEngineConfig.from_defaults() if path is None else LMCacheEngineConfig.from_file(path)
        brings = {name: value for name in _REFUSED if (value := getattr(config, name, None) or config.get_extra_config_value(name))}
        if not brings:
            config.validate()
    except (OSError, ValueError, TypeError, AssertionError, AttributeError, YAMLError) as error:
        raise ConfigError(f"{where} cannot be used ({type(error).__name__}: {error}); mend it, or give lmcache alone") from error
    if brings:
        name, value = next(iter(brings.items()))
        raise ConfigError(
            f"{where}: {name} is {value!r}, and only memory and disk are taken, since lookups in other backends would hold the engine's step up; "
            "leave it out, and use max_local_cpu_size and local_disk"
        )
    if not config.local_cpu or config.max_local_cpu_size <= 0:
        raise ConfigError(
            f"{where}: local_cpu is {config.local_cpu}, max_local_cpu_size {config.max_local_cpu_size} (GiB), and every blob passes through LMCache's memory; "
            "give true and more than 0, such as 8.0"
        )
    return config


def _make_manager(config: Any, namespace: str, device: torch.device | None) -> Any:
    # What LMCache would refuse only after it has started a thread.
    try:
        get_cache_policy(config.cache_policy)
        for folder in (config.local_disk or "").split(","):
            if folder.strip():
                os.makedirs(folder.strip(), exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"LMCache cannot use disk {config.local_disk!r} with cache_policy {config.cache_policy!r} ({error}); change them") from error
    # The layers' shape is for LMCache's engine, which is not used.
    metadata = LMCacheMetadata(
        model_name=f"atoll.{namespace}",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, config.chunk_size, 1, 1),
    )
    made: list[Any] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            if device is not None and device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
            PinMonitor.GetOrCreate(config)
            made.append(StorageManager(config, metadata, EventManager()))
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            errors.append(error)

    # A thread inherits from the one that starts it whether it keeps the process alive, and LMCache's loop would.
    thread = threading.Thread(target=make, name="lmcache-start", daemon=True)
    thread.start()
    thread.join()
    if not made:
        reason = errors[0] if errors else "its thread has died; its log says why"
        raise ConfigError(
            f"LMCache cannot start with {config.max_local_cpu_size} GiB of memory and disk {config.local_disk!r}: {reason}; change its configuration"
        )
    return made[0]
