"""Memory of a compiled kernel: the caller's buffers with their bounds, and shared memory that knows who touched each place last, and who may know of it.

Accesses are ordered by vector clocks. Agents are the warps, the copies' engine (TMA), each warp's products in flight (wgmma) and its lanes' copies (cp.async):
what a warp has seen of an agent is the last of its times that a barrier or a wait has told the warp of. Two accesses of which one writes, by agents that have
not seen each other, are a Race. An access by the asynchronous proxy (TMA, wgmma) to what a thread stored is a Fault unless somebody who has seen the store has
fenced it, and whoever starts the access has seen that fence.
"""

import numpy as np
import torch

from tests.kit.ptx.faults import Fault, Race

# Of shared memory: the smallest access of these kernels.
CELL_BYTES = 2

# Buffers are far apart, so that no offset leads from one into another.
_SPACING = 1 << 40


class GlobalMemory:
    """The buffers that a launch was given, each at an address of its own."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by the host's address: address here, bytes

    def add(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's first element; all of its storage may be accessed."""
        storage = tensor.untyped_storage()
        host = storage.data_ptr()
        if host not in self._buffers:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._buffers[host] = ((len(self._buffers) + 1) * _SPACING, whole)
        return self._buffers[host][0] + tensor.data_ptr() - host

    def load(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """Bytes `[len(addresses), num_bytes]`."""
        result = np.empty((len(addresses), num_bytes), np.uint8)
        for threads, buffer, places in self._places(addresses, num_bytes):
            result[threads] = buffer[places]
        return result

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        for threads, buffer, places in self._places(addresses, data.shape[1]):
            buffer[places] = data[threads]

    def check(self, address: int, num_bytes: int, align: int) -> None:
        """That so many bytes lie in one buffer and are aligned."""
        if address % align or num_bytes % align:
            raise Fault(f"{num_bytes} bytes at {address:#x}, not both multiples of {align}")
        if not any(base <= address and address + num_bytes <= base + len(buffer) for base, buffer in self._buffers.values()):
            raise Fault(f"{num_bytes} bytes at {address:#x} of global memory, out of bounds of every buffer")

    def _places(self, addresses: np.ndarray, num_bytes: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if (addresses % np.uint64(num_bytes)).any():
            raise Fault(f"an access of {num_bytes} bytes at {int(addresses[addresses % np.uint64(num_bytes) != 0][0]):#x}, which is no multiple of them")
        at = addresses.astype(np.int64)
        stray = np.ones(len(at), bool)
        found = []
        for base, buffer in self._buffers.values():
            inside = (base <= at) & (at + num_bytes <= base + len(buffer))
            if inside.any():
                stray &= ~inside
                found.append((np.flatnonzero(inside), buffer, (at[inside] - base)[:, None] + np.arange(num_bytes)))
        if stray.any():
            raise Fault(f"an access of {num_bytes} bytes at {int(at[stray][0]):#x} of global memory, out of bounds of every buffer")
        return found


class SharedMemory:
    """The shared memory of one program."""

    def __init__(self, num_bytes: int, num_warps: int) -> None:
        # Fresh memory holds NaN in every format.
        self.bytes = np.full(num_bytes, 0xFF, np.uint8)
        self.num_warps = num_warps
        self.copier = num_warps
        self.num_agents = 3 * num_warps + 1
        self.time = np.ones(self.num_agents, np.int32)  # each agent's own
        self.seen = np.zeros((num_warps, self.num_agents), np.int32)  # what each warp knows of each
        num_cells = -(-num_bytes // CELL_BYTES)
        self.reserved = np.zeros(num_cells, bool)  # a barrier's
        self._writer = np.full(num_cells, -1, np.int16)
        self._written = np.zeros(num_cells, np.int32)  # the writer's time
        self._written_line = np.zeros(num_cells, np.int32)
        self._read = np.zeros((self.num_agents, num_cells), np.int32)  # each agent's time
        self._read_line = np.zeros((self.num_agents, num_cells), np.int32)
        self._fenced = np.zeros((num_warps, num_cells), np.int32)  # each warp's time, of fences since the cell was written

    def product(self, warp: int) -> int:
        """The agent of a warp's products in flight."""
        return self.num_warps + 1 + warp

    def lanes(self, warp: int) -> int:
        """The agent of a warp's copies, lane by lane."""
        return 2 * self.num_warps + 1 + warp

    def cells(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """The cells of accesses of so many bytes each."""
        if num_bytes % CELL_BYTES or (addresses % num_bytes).any():
            raise Fault(f"an access of {num_bytes} bytes of shared memory, not a multiple of {CELL_BYTES} or not at a multiple of itself")
        stray = (addresses < 0) | (addresses + num_bytes > len(self.bytes))
        if stray.any():
            raise Fault(f"an access at {int(addresses[stray][0])} of shared memory, out of bounds of its {len(self.bytes)} bytes")
        return np.unique(addresses[:, None] // CELL_BYTES + np.arange(num_bytes // CELL_BYTES))

    def meet(self) -> None:
        """All threads have come to a barrier."""
        np.fill_diagonal(self.seen, self.time[: self.num_warps])
        self.seen[:] = self.seen.max(0)
        self.time[: self.num_warps] += 1

    def learn(self, warp: int, times: np.ndarray) -> None:
        """A warp has waited for what tells it of the agents' times."""
        np.maximum(self.seen[warp], times, out=self.seen[warp])

    def told(self, warp: int) -> np.ndarray:
        """What a warp that arrives somewhere tells those who wait there: all it knows and all it did."""
        times = self.seen[warp].copy()
        times[warp] = self.time[warp]
        self.time[warp] += 1
        return times

    def fence(self, warp: int) -> None:
        """All stores that a warp has made or seen are ordered before what the asynchronous proxy does after."""
        stored = self._by_threads(self._writer) & self._known(warp, np.arange(len(self._writer)))
        self._fenced[warp, stored] = self.time[warp]

    def on_read(self, warp: int, cells: np.ndarray, line: int, agent: int | None = None, barrier: bool = False) -> None:
        """A warp reads, or starts an agent of the asynchronous proxy that does."""
        self._check_owner(cells, barrier)
        unknown = ~self._known(warp, cells)
        if unknown.any():
            raise Race(f"warp {warp} reads {self._last_write(cells[unknown][0])}")
        if agent is not None:
            self._check_fenced(warp, cells, "reads")
        reader = warp if agent is None else agent
        self._read[reader, cells] = self.time[reader]
        self._read_line[reader, cells] = line

    def on_write(self, warp: int, cells: np.ndarray, line: int, agent: int | None = None, same: bool = False, barrier: bool = False) -> None:
        """A warp writes, or starts a copy that does. `same`: what is there already, as warps do that computed one thing twice."""
        self._check_owner(cells, barrier)
        unknown = ~self._known(warp, cells)
        if unknown.any() and not same:
            raise Race(f"warp {warp} writes over {self._last_write(cells[unknown][0])}")
        read = self._read[:, cells]
        unknown = read > self._times(warp)[:, None]
        if unknown.any():
            reader, i = (int(x[0]) for x in np.nonzero(unknown))
            raise Race(
                f"warp {warp} writes over byte {CELL_BYTES * int(cells[i])} of shared memory, which {self._agent_name(reader)} reads in line "
                f"{self._read_line[reader, cells[i]]}; nothing orders the two"
            )
        if agent == self.copier:
            self._check_fenced(warp, cells, "writes over")
        writer = warp if agent is None else agent
        self._writer[cells] = writer
        self._written[cells] = self.time[writer]
        self._written_line[cells] = line
        self._fenced[:, cells] = 0

    def _times(self, warp: int) -> np.ndarray:
        """What a warp knows, itself included."""
        times = self.seen[warp].copy()
        times[warp] = self.time[warp]
        return times

    def _known(self, warp: int, cells: np.ndarray) -> np.ndarray:
        """Which cells' last writes a warp has seen."""
        writer = self._writer[cells]
        return (writer < 0) | (self._times(warp)[writer] >= self._written[cells])

    def _check_owner(self, cells: np.ndarray, barrier: bool) -> None:
        if not barrier and self.reserved[cells].any():
            raise Fault(f"an access to byte {CELL_BYTES * int(cells[self.reserved[cells]][0])} of shared memory, which is a barrier's")

    def _check_fenced(self, warp: int, cells: np.ndarray, does: str) -> None:
        stored = cells[self._by_threads(self._writer[cells])]
        fenced = self._fenced[:, stored]
        bare = ~((fenced > 0) & (fenced <= self._times(warp)[: self.num_warps, None])).any(0)
        if bare.any():
            raise Fault(f"the asynchronous proxy {does} {self._last_write(stored[bare][0])} by fence.proxy.async")

    def _by_threads(self, writer: np.ndarray) -> np.ndarray:
        """Whether not by the asynchronous proxy; copies by lanes are not."""
        return ((writer >= 0) & (writer < self.num_warps)) | (writer >= self.lanes(0))

    def _last_write(self, cell: int) -> str:
        writer = self._agent_name(int(self._writer[cell]))
        return f"byte {CELL_BYTES * int(cell)} of shared memory, which {writer} wrote in line {self._written_line[cell]}; nothing orders the two"

    def _agent_name(self, agent: int) -> str:
        if agent < self.num_warps:
            return f"warp {agent}"
        if agent == self.copier:
            return "a copy by TMA"
        return f"a product of warp {agent - self.product(0)}" if agent < self.lanes(0) else f"a copy by lanes of warp {agent - self.lanes(0)}"
