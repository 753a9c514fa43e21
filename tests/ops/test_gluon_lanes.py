"""Copies that each lane makes for itself (cp.async), in our interpreter of Gluon: they arrive, and each hazard is seen."""

from typing import Any

import pytest
import torch

from atoll.probe.gluon_interpreter import gluon_interpreted
from atoll.probe.gluon_memory import HazardError
from atoll.probe.watch import OutOfRangeError, watched
from tests.ops import gluon_kernels


def copy_lanes(first: int = 8, **faults: Any) -> torch.Tensor:
    x, out = torch.arange(256, dtype=torch.int16), torch.zeros(4, 16, dtype=torch.int16)
    choices = {"STEP": 1, "COUNT": 128, "ARRIVALS": 1, "WAIT": True, "AGAIN": False, "MEET": True} | faults
    with watched([out, x]), gluon_interpreted():
        gluon_kernels.copy_lanes_kernel[(1,)](out, x[(16 - x.data_ptr() % 16) % 16 // 2 :], first, num_warps=4, **choices)
    return out


def test_rows_arrive_that_lanes_copy() -> None:
    for faults in ({}, {"AGAIN": True}):
        assert torch.equal(copy_lanes(**faults).flatten(), torch.arange(8, 72, dtype=torch.int16))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"ARRIVALS": 0}, "a wait for a phase with 128 arrivals missing would hang"),
        ({"ARRIVALS": 0, "WAIT": False}, "copies of its lanes in flight, which were never waited for"),
        ({"WAIT": False}, "copies of its lanes in flight, which were never waited for"),
        ({"COUNT": 1}, "128 arrivals at a barrier that waits for 1 more"),
        ({"COUNT": 129}, "a wait for a phase with 1 arrivals missing would hang"),
        ({"ARRIVALS": 2}, "128 arrivals at a barrier that waits for 0 more"),
        ({"AGAIN": True, "MEET": False}, "that was read since the last program_barrier"),
        ({"AGAIN": True, "WAIT": False}, "a copy into shared memory that a copy in flight is still to write"),
        # 8 elements of 2 bytes a lane.
        ({"first": 4}, "16 bytes does not lie in one piece at a multiple of that"),
        ({"STEP": 2}, "16 bytes does not lie in one piece at a multiple of that"),
    ],
)
def test_what_copies_of_lanes_must_not_do_is_an_error(faults: dict[str, Any], said: str) -> None:
    with pytest.raises(HazardError, match=said):
        copy_lanes(**faults)


def test_lanes_that_copy_from_nowhere_are_found() -> None:
    with pytest.raises(OutOfRangeError, match="load of"):
        copy_lanes(256)
