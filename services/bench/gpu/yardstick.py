"""The yardstick of the GPU benchmark: the driver's own asynchronous copies, called without anything of ours between.

Idea: pinned memory and one stream, as many copies of the same bytes as ours make, one synchronisation at the end:
no mover of bytes between host and device is faster than the copy engines. libcuda is called by ctypes, so that it
needs neither torch nor the code that is judged.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from mooncache.errors import TransportUnavailable

_PORTABLE = 1
_NON_BLOCKING = 1


class PinnedCopies:
    """Buffers of `size_bytes`: one pinned, two on the device. Rates are GB/s over `count` copies.

    Raises:
        TransportUnavailable: no CUDA here, with the reason.
    """

    def __init__(self, size_bytes: int, library: str = "") -> None:
        try:
            self._cuda = ctypes.CDLL(library or "libcuda.so.1")
        except OSError as error:
            raise TransportUnavailable(f"CUDA unavailable, because {error}.") from None
        self._size_bytes = size_bytes
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._host = ctypes.c_void_p()
        self._device = [ctypes.c_uint64(), ctypes.c_uint64()]
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxPushCurrent_v2", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._call("cuMemHostAlloc", ctypes.byref(self._host), ctypes.c_size_t(size_bytes), _PORTABLE)
        for memory in self._device:
            self._call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise TransportUnavailable(f"{name} answered {code}.")

    def out(self, count: int) -> float:
        """From the device to pinned memory."""
        size = ctypes.c_size_t(self._size_bytes)
        return self._rate(
            count,
            lambda: self._call("cuMemcpyDtoHAsync_v2", self._host, self._device[0], size, self._stream),
        )

    def into(self, count: int) -> float:
        """From pinned memory to the device."""
        size = ctypes.c_size_t(self._size_bytes)
        return self._rate(
            count,
            lambda: self._call("cuMemcpyHtoDAsync_v2", self._device[0], self._host, size, self._stream),
        )

    def across(self, count: int) -> float:
        """From the device to itself; bytes count once, as in the other rates."""
        size = ctypes.c_size_t(self._size_bytes)
        return self._rate(
            count,
            lambda: self._call("cuMemcpyDtoDAsync_v2", self._device[1], self._device[0], size, self._stream),
        )

    def _rate(self, count: int, enqueue: Callable[[], None]) -> float:
        enqueue()
        self._call("cuStreamSynchronize", self._stream)
        begun_s = time.perf_counter()
        for _ in range(count):
            enqueue()
        self._call("cuStreamSynchronize", self._stream)
        return count * self._size_bytes / (time.perf_counter() - begun_s) / 1e9

    def close(self) -> None:
        """Give everything back."""
        for memory in self._device:
            self._call("cuMemFree_v2", memory)
        self._call("cuMemFreeHost", self._host)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", 0)
