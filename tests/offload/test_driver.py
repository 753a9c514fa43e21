"""What is asked of the CUDA driver, through C functions of its own signatures over host memory: addresses, sizes, attributes, and both kinds of batch."""

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError
from atoll.offload import host_pages as host_pages_module
from atoll.offload import stream_copier
from atoll.offload.copier import Way
from atoll.offload.driver import CopyAttributes, Driver
from atoll.offload.host_pages import HostPages
from atoll.offload.runs import make_runs
from atoll.offload.stream_copier import Issue, StreamCopier, addresses, choose_issue
from tests.offload.regions import PAGE_BYTES, random_rows

STREAM = 0x7F0000001000  # a pointer: more than 32 bits
INVALID = 1
NAMES = {INVALID: b"CUDA_ERROR_INVALID_VALUE"}

# As cuda.h 13.0 declares them.
COPY = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)
BATCH = CFUNCTYPE(
    c_int, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p
)
BATCH_V2 = CFUNCTYPE(c_int, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t, c_void_p)
REGISTER = CFUNCTYPE(c_int, c_void_p, c_size_t, c_uint)
UNREGISTER = CFUNCTYPE(c_int, c_void_p)
ERROR_NAME = CFUNCTYPE(c_int, c_int, POINTER(c_char_p))


class FakeCuda:
    """A driver that copies in host memory at once, and counts what it copied; it fails at the copy that is given."""

    def __init__(self, *, batch: str | None = "cuMemcpyBatchAsync_v2", fail_at: int | None = None) -> None:
        self.num_copies = 0
        self.num_calls = 0
        self.registered: dict[int, int] = {}
        self.fail_at = fail_at
        functions: dict[str, Any] = {
            "cuMemcpyAsync": COPY(self.copy),
            "cuMemHostRegister_v2": REGISTER(self.register),
            "cuMemHostUnregister": UNREGISTER(lambda address: 0 if self.registered.pop(address, None) else INVALID),
            "cuGetErrorName": ERROR_NAME(self.name),
        }
        if batch == "cuMemcpyBatchAsync_v2":
            functions[batch] = BATCH_V2(self.batch)
        elif batch is not None:
            functions[batch] = BATCH(self.batch_v1)
        self.driver = Driver(SimpleNamespace(**functions))

    def copy(self, target: int, source: int, size: int, stream: int) -> int:
        if stream != STREAM or self.num_copies == self.fail_at:
            return INVALID
        self.num_calls += 1
        self.num_copies += 1
        ctypes.memmove(target, source, size)
        return 0

    def batch(self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, firsts: Any, num_attributes: int, stream: int) -> int:
        # 1: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.
        if (num_attributes, firsts[0], attributes[0].src_access_order, attributes[0].flags, stream) != (1, 0, 1, 0, STREAM):
            return INVALID
        for i in range(count):
            if self.copy(targets[i], sources[i], sizes[i], stream):
                return INVALID
        self.num_calls = 1
        return 0

    def batch_v1(self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, firsts: Any, num_attributes: int, failed: Any, stream: int) -> int:
        failed[0] = 0
        return self.batch(targets, sources, sizes, count, attributes, firsts, num_attributes, stream)

    def register(self, address: int, size: int, flags: int) -> int:
        if self.fail_at is not None or flags != 1:
            return INVALID
        self.registered[address] = size
        return 0

    def name(self, code: int, text: Any) -> int:
        text[0] = NAMES[code]
        return 0


PAGES, SLOTS = [5, 6, 7, 12, 30], [8, 9, 10, 20, 2]


def copied(call: Callable[[np.ndarray, np.ndarray, np.ndarray, int], str | None]) -> tuple[str | None, torch.Tensor, torch.Tensor]:
    """A call's answer, what it left in 30 host pages, and what should be there."""
    pool, host = random_rows(40, 0), random_rows(30, 1)
    expected = host.clone()
    expected[SLOTS] = pool[PAGES]
    runs = make_runs(PAGES, SLOTS)
    return call(addresses(host, runs.slots), addresses(pool, runs.pages), (runs.lengths * PAGE_BYTES).astype(np.uint64), STREAM), host, expected


@pytest.mark.parametrize("batch", ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"])
def test_a_batch_copies_all_runs_in_one_call(batch: str) -> None:
    fake = FakeCuda(batch=batch)
    assert fake.driver.has_batches
    fault, host, expected = copied(fake.driver.copy_batch)
    assert fault is None and torch.equal(host, expected)
    assert (fake.num_copies, fake.num_calls) == (3, 1)


@pytest.mark.parametrize("issue", ["batch", "each"])
@pytest.mark.parametrize("way", Way)
def test_many_runs_are_issued_in_parts_and_none_after_a_failure(way: Way, issue: Issue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_copier, "MAX_BATCH", 2)
    # Five runs, as no two are adjacent on both sides: parts of 2, 2 and 1.
    pages, slots = [5, 9, 7, 12, 30], [8, 11, 16, 20, 2]
    for fail_at, num_copied in ((None, 5), (3, 3), (4, 4)):
        cuda, pool, host, runs = FakeCuda(fail_at=fail_at), random_rows(40, 0), random_rows(30, 1), make_runs(pages, slots)
        parts, copy = list[int](), getattr(cuda.driver, f"copy_{issue}")
        monkeypatch.setattr(cuda.driver, f"copy_{issue}", lambda *arrays, parts=parts, copy=copy: [parts.append(len(arrays[0])), copy(*arrays)][1])
        expected_pool, expected_host = pool.clone(), host.clone()
        in_order = [(int(page), int(slot)) for page, slot in zip(runs.pages, runs.slots, strict=True)][:num_copied]
        for page, slot in in_order:
            if way is Way.LOAD:
                expected_pool[page] = host[slot]
            else:
                expected_host[slot] = pool[page]
        copier = StreamCopier.__new__(StreamCopier)  # without a GPU's streams
        copier._pool, copier._host, copier._driver, copier.issue = pool, host, cuda.driver, issue
        fault = copier._issue_runs(way, runs, SimpleNamespace(cuda_stream=STREAM))  # type: ignore[arg-type]
        assert (fault is None) == (fail_at is None) and parts == {None: [2, 2, 1], 3: [2, 2], 4: [2, 2, 1]}[fail_at]
        assert torch.equal(pool, expected_pool) and torch.equal(host, expected_host)


def test_each_run_is_a_call() -> None:
    fake = FakeCuda(batch=None)
    assert not fake.driver.has_batches
    fault, host, expected = copied(fake.driver.copy_each)
    assert fault is None and torch.equal(host, expected)
    assert (fake.num_copies, fake.num_calls) == (3, 3)


def test_attributes_lie_as_the_driver_reads_them() -> None:
    # sizeof and offsetof of CUmemcpyAttributes, compiled from cuda.h 13.0.
    assert ctypes.sizeof(CopyAttributes) == 24
    assert [getattr(CopyAttributes, name).offset for name in ("src_access_order", "src_hint", "dst_hint", "flags")] == [0, 4, 12, 20]


def test_a_failed_copy_is_named() -> None:
    for copy in ("copy_batch", "copy_each"):
        fake = FakeCuda(fail_at=1)
        fault, host, expected = copied(getattr(fake.driver, copy))
        assert fault is not None and fault.endswith("CUDA_ERROR_INVALID_VALUE")
        assert fake.num_copies == 1 and not torch.equal(host, expected)


def test_the_default_stream_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="default stream"):
        FakeCuda().driver.copy_batch(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.uint64), 0)


def test_the_issue_that_was_asked_for_or_the_reason() -> None:
    new, old = FakeCuda().driver, FakeCuda(batch=None).driver
    assert [choose_issue(driver, "auto", is_pinned=True) for driver in (new, old, None)] == ["batch", "each", "torch"]
    assert choose_issue(new, "auto", is_pinned=False) == "each"
    assert choose_issue(new, "torch", is_pinned=True) == "torch"
    for driver, is_pinned, reason in ((new, False, "not pinned"), (old, True, "older than CUDA 12.8"), (None, True, "no CUDA driver")):
        with pytest.raises(ConfigError, match=f"'batch': .*{reason}"):
            choose_issue(driver, "batch", is_pinned=is_pinned)


def test_host_pages_are_pinned_once_and_unpinned_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(host_pages_module, "load_driver", lambda: fake.driver)
    host = HostPages.anonymous(5, PAGE_BYTES)
    assert not host.is_pinned
    host.pin()
    host.pin()
    assert host.is_pinned and fake.registered == {host.pages.data_ptr(): 5 * PAGE_BYTES}
    host.close()
    host.close()
    assert not host.is_pinned and fake.registered == {}


def test_host_pages_that_cannot_be_pinned_say_so_and_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_pages_module, "load_driver", lambda: FakeCuda(fail_at=0).driver)
    host = HostPages.anonymous(5, PAGE_BYTES)
    host.pin()
    assert not host.is_pinned and host.num_pages == 5
    assert "cannot be pinned (cuMemHostRegister_v2: CUDA_ERROR_INVALID_VALUE)" in caplog.text
    host.close()
