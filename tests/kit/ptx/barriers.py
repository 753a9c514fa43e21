"""Barriers in shared memory (mbarrier) of a compiled program, and the copies that arrive at them: by TMA, or by lanes (cp.async)."""

from dataclasses import dataclass, field

import numpy as np

from tests.kit.ptx.faults import Fault
from tests.kit.ptx.memory import CELL_BYTES, SharedMemory

BARRIER_BYTES = 8


@dataclass
class Barrier:
    """Its phase ends when all have arrived and all bytes are there."""

    count: int
    told: np.ndarray  # times of agents, by those who arrived in this phase
    left: int  # arrivals to come
    expected: int = 0  # bytes to come, less than none where a copy came first
    parity: int = 0  # of the phase that runs
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # addresses, bytes
    ended: dict[int, np.ndarray] = field(default_factory=dict)  # what was told in the last phase of each parity

    @property
    def at_rest(self) -> bool:
        return self.left == self.count and not self.expected and not self.copies


class Barriers:
    """All barriers of a program."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._barriers: dict[int, Barrier] = {}  # by address
        # Of each warp: copies by its lanes that no arrival has been asked for yet.
        self._in_flight: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(shared.num_warps)]

    def init(self, address: int, count: int, warp: int, line: int) -> None:
        if address in self._barriers:
            raise Fault(f"the barrier at {address} is made a second time")
        cells = self._shared.cells(np.array([address]), BARRIER_BYTES)
        self._shared.on_write(warp, cells, line)
        self._shared.reserved[cells] = True
        times = np.zeros(self._shared.num_agents, np.int32)
        # The phase before the first has ended, with nothing in it.
        self._barriers[address] = Barrier(count, times, count, ended={1: times.copy()})

    def invalidate(self, address: int, warp: int, line: int) -> None:
        barrier = self._reached(address, warp, line)
        if not barrier.at_rest:
            raise Fault(f"the barrier at {address} is given up with {barrier.left} of {barrier.count} arrivals and {barrier.expected} bytes to come")
        cells = self._shared.cells(np.array([address]), BARRIER_BYTES)
        self._shared.on_write(warp, cells, line, barrier=True)
        self._shared.reserved[cells] = False
        del self._barriers[address]

    def expect(self, address: int, num_bytes: int, warp: int, line: int) -> None:
        """One arrival, and so many bytes more until the phase ends."""
        barrier = self._reached(address, warp, line)
        if not barrier.left:
            raise Fault(f"an arrival at the barrier at {address}, at which all {barrier.count} have arrived")
        barrier.left -= 1
        barrier.expected += num_bytes
        np.maximum(barrier.told, self._shared.told(warp), out=barrier.told)
        self._end_phase(barrier)

    def copy(self, address: int, destination: np.ndarray, data: np.ndarray, warp: int, line: int) -> None:
        """A copy by TMA starts; its bytes arrive when the phase ends, and until then there is NaN."""
        barrier, shared = self._reached(address, warp, line, shared_agent=self._shared.copier), self._shared
        if destination.min() < 0 or destination.max() >= len(shared.bytes):
            raise Fault(f"a copy to {destination.min()} to {destination.max()} of shared memory, out of bounds of its {len(shared.bytes)} bytes")
        shared.on_write(warp, np.unique(destination // CELL_BYTES), line, shared.copier)
        shared.bytes[destination] = 0xFF
        barrier.copies.append((destination, data))
        barrier.expected -= len(data)
        barrier.told[shared.copier] = shared.time[shared.copier]
        shared.time[shared.copier] += 1
        self._end_phase(barrier)

    def copy_by_lanes(self, addresses: np.ndarray, data: np.ndarray, warp: int, line: int) -> None:
        """Each lane starts a copy of `data [lanes, bytes]`."""
        shared = self._shared
        shared.on_write(warp, shared.cells(addresses, data.shape[1]), line, shared.lanes(warp))
        places = addresses[:, None] + np.arange(data.shape[1])
        shared.bytes[places] = 0xFF
        self._in_flight[warp].append((places, data))

    def arrive_with_copies(self, address: int, num_lanes: int, warp: int, line: int) -> None:
        """Each lane arrives when what it copied is there; of what else it did, nobody is told."""
        barrier, agent = self._reached(address, warp, line), self._shared.lanes(warp)
        if num_lanes > barrier.left:
            raise Fault(f"{num_lanes} arrivals at the barrier at {address}, which waits for {barrier.left} more of {barrier.count}")
        barrier.left -= num_lanes
        barrier.copies += self._in_flight[warp]
        self._in_flight[warp] = []
        barrier.told[agent] = self._shared.time[agent]
        self._shared.time[agent] += 1
        self._end_phase(barrier)

    def wait(self, address: int, parity: int, line: int) -> None:
        """All warps wait for a phase of that parity to have ended."""
        for warp in range(self._shared.num_warps):
            barrier = self._reached(address, warp, line)
            if parity not in (0, 1) or parity == barrier.parity:
                raise Fault(
                    f"a wait for parity {parity} of the barrier at {address}, which would hang: parity {barrier.parity} runs, {barrier.left} arrivals and "
                    f"{barrier.expected} bytes are to come"
                )
            self._shared.learn(warp, barrier.ended[parity])

    def close(self) -> None:
        """The program has ended."""
        if any(self._in_flight):
            raise Fault("the program ends with copies by lanes in flight, which nobody can wait for")
        for address, barrier in self._barriers.items():
            if not barrier.at_rest:
                raise Fault(
                    f"the program ends with {barrier.left} of {barrier.count} arrivals and {barrier.expected} bytes to come at the barrier at {address}"
                )

    def _reached(self, address: int, warp: int, line: int, shared_agent: int | None = None) -> Barrier:
        if address not in self._barriers:
            raise Fault(f"there is no barrier at {address}; those made are at {sorted(self._barriers)}")
        self._shared.on_read(warp, self._shared.cells(np.array([address]), BARRIER_BYTES), line, shared_agent, barrier=True)
        return self._barriers[address]

    def _end_phase(self, barrier: Barrier) -> None:
        if barrier.left or barrier.expected:
            return
        for destination, data in barrier.copies:
            self._shared.bytes[destination] = data
        barrier.copies.clear()
        barrier.ended[barrier.parity] = barrier.told.copy()
        barrier.told[:] = 0
        barrier.parity ^= 1
        barrier.left = barrier.count
