"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from tests.kit.interpreter import InterpreterPool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[InterpreterPool]:
    """Worker processes that interpret Triton kernels; started by the first test that uses them."""
    pool = InterpreterPool()
    yield pool
    pool.close()
