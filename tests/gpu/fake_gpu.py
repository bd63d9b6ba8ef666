"""A fake GPU for tests: its memory cannot be read by the processor (a slip is a crash), its copies happen only
when somebody asks for them, and it can be told to fail or to hang. The kernel that it runs is the real one's source."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from mooncache import _native

SOURCE = Path(__file__).resolve().parents[2] / "native/tests/gpu/fake/fake_cuda.cpp"


@cache
def library() -> str:
    """The fake driver, built once."""
    out = Path(tempfile.mkdtemp(prefix="mooncache-cuda-")) / "libfake_cuda.so"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(out), str(SOURCE)], check=True
    )
    return str(out)


class FakeGpu:
    """The driver with or without a compiler for the kernel, and arrays in its memory."""

    def __init__(self, *, kernel: bool) -> None:
        path = library()
        self.lib = ctypes.CDLL(path)
        self.lib.fake_cuda_peek.argtypes = (ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_size_t)
        self.lib.fake_cuda_poke.argtypes = (ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_size_t)
        self.lib.fake_cuda_event.restype = ctypes.c_void_p
        self.lib.fake_cuda_complete.argtypes = (ctypes.c_void_p,)
        self.lib.fake_cuda_adopt.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.lib.fake_cuda_adopt.restype = ctypes.c_ulonglong
        self.device = _native.GpuDevice(0, path, path if kernel else "none")

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """The next call of that name but `after` answers `code`."""
        self.lib.fake_cuda_fail(name.encode(), code, after)

    def hang(self, on: bool) -> None:
        """While it hangs no copy ends."""
        self.lib.fake_cuda_hang(int(on))

    def wrong_kernel(self, on: bool) -> None:
        """Whether checksums come out wrong from now on."""
        self.lib.fake_cuda_wrong_kernel(int(on))

    def event(self) -> tuple[Any, int]:
        """An event that is not there yet, as GpuBlocks records it."""
        handle = self.lib.fake_cuda_event()
        return handle, handle

    def complete(self, event: tuple[Any, int]) -> None:
        """What the event stands behind is through."""
        self.lib.fake_cuda_complete(event[1])

    def adopt(self, address: int, size_bytes: int) -> int:
        """Memory of the test as device memory, where the test can look at it; its device address."""
        return int(self.lib.fake_cuda_adopt(address, size_bytes))

    def array(self, content: bytes, **interface: Any) -> Array:
        address = self.device.allocate(max(len(content), 1))
        assert self.lib.fake_cuda_poke(address, content, len(content)) == 0
        return Array(self, address, len(content), interface)

    def restore(self) -> None:
        """As it was made."""
        self.hang(False)
        self.wrong_kernel(False)
        self.fail("", 0)


class Array:
    """Device memory as cupy and torch show it."""

    def __init__(self, gpu: FakeGpu, address: int, size: int, interface: dict[str, Any]) -> None:
        self.gpu, self.address, self.size = gpu, address, size
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
            **interface,
        }

    def read(self) -> bytes:
        out = ctypes.create_string_buffer(self.size)
        assert self.gpu.lib.fake_cuda_peek(self.address, out, self.size) == 0
        return out.raw
