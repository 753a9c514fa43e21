"""One server for the tests that only ask; those that break it start their own."""

from collections.abc import Iterator

import pytest
import torch

from tests.server.running import Running, running_server


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def server(one_thread: None) -> Iterator[Running]:
    with running_server() as running:
        yield running
