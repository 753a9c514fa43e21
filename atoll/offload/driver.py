"""What pinning and batched copies need of the CUDA driver, called through ctypes: torch offers neither; knows no page and no stream of torch.

The driver's own names tell two signatures apart, which the runtime's do not: `cuMemcpyBatchAsync` (12.8) has a `failIdx`, `cuMemcpyBatchAsync_v2` (13.0) has
none. Every call returns why it failed, or None: unlike the runtime, the driver keeps no last error that torch would find later and raise elsewhere.
The calls work on the current context, which is torch's on every thread that has issued work.
"""

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

_PORTABLE = 1  # pinned for every device's context
_SRC_ACCESS_ORDER_STREAM = 1  # sources are read in the stream's order: a store must not read before its fence


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes, 24 bytes; the hints are for managed memory only."""

    _fields_ = [("src_access_order", c_int), ("src_hint", _Location), ("dst_hint", _Location), ("flags", c_uint)]


_SIGNATURES: dict[str, list[Any]] = {
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],  # address, bytes, flags
    "cuMemHostUnregister": [c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],  # destination, source, bytes, stream
    # destinations, sources, bytes, count, attributes, index of each one's first copy, their number, [the copy that failed,] stream
    "cuMemcpyBatchAsync": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p],
    "cuMemcpyBatchAsync_v2": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p],
    "cuGetErrorName": [c_int, c_void_p],
}


class Driver:
    """Functions of `library`, a ctypes library or anything with its attributes."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
                self._functions[name] = function

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` is there: CUDA 12.8 and later."""
        return "cuMemcpyBatchAsync" in self._functions or "cuMemcpyBatchAsync_v2" in self._functions

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Lock memory, so that devices read and write it directly. Its pages become resident, which takes a while."""
        return self._fault("cuMemHostRegister_v2", address, num_bytes, _PORTABLE)

    def unpin(self, address: int) -> str | None:
        """What `pin` locked; nothing may be in flight there."""
        return self._fault("cuMemHostUnregister", address)

    def copy_each(self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> str | None:
        """One call a copy; arrays [N] of addresses and bytes. After a failure no further copy is issued."""
        copy = self._functions["cuMemcpyAsync"]
        for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            code = copy(destination, source, size, stream)
            if code != 0:
                return self._describe("cuMemcpyAsync", code)
        return None

    def copy_batch(self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> str | None:
        """All copies in one call, in any order among themselves. The stream is not the default one, which takes no batch."""
        assert stream != 0, "the default stream takes no batch of copies"
        attributes, first, failed = CopyAttributes(_SRC_ACCESS_ORDER_STREAM), c_size_t(0), c_size_t(0)
        arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (destinations, sources, sizes)]
        arguments = [*(array.ctypes.data for array in arrays), len(sizes), ctypes.addressof(attributes), ctypes.addressof(first), 1]
        if "cuMemcpyBatchAsync_v2" in self._functions:
            return self._fault("cuMemcpyBatchAsync_v2", *arguments, stream)
        return self._fault("cuMemcpyBatchAsync", *arguments, ctypes.addressof(failed), stream)

    def _fault(self, name: str, *arguments: int) -> str | None:
        code = self._functions[name](*arguments)
        return None if code == 0 else self._describe(name, code)

    def _describe(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        self._functions["cuGetErrorName"](code, ctypes.addressof(text))
        return f"{name}: {text.value.decode() if text.value else f'error {code}'}"


def load_driver() -> Driver | None:
    """NVIDIA's driver, as torch has loaded it; None where there is none, as under ROCm."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
