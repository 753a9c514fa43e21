"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from tests.kit.workers import WorkerPool, interpreting_pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[WorkerPool]:
    """Worker processes that interpret Triton kernels; started by the first test that uses them."""
    pool = interpreting_pool()
    yield pool
    pool.close()
