"""LMCache's memory as bytes of ours: where an object lies, and what is worth registering with RDMA devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from mooncache.errors import InvalidArgument


def view_of(memory_obj: Any) -> memoryview:
    """The bytes of an object, without a copy. It must be kept while they are used.

    Raises:
        InvalidArgument: it has no bytes in host memory.
    """
    content = memory_obj.byte_array
    if not isinstance(content, memoryview) or memory_obj.raw_data.device.type != "cpu":
        raise InvalidArgument(f"A {type(memory_obj).__name__} has no bytes in host memory.")
    return content.cast("B")


def tensors_of(memory_obj: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shapes and types of the tensors that lie in an object, one after the other."""
    meta = memory_obj.metadata
    if meta.shapes is None or meta.dtypes is None:
        return [meta.shape], [meta.dtype]
    return meta.shapes, meta.dtypes


class CacheMemory:
    """The memory in which LMCache has its objects, when it is one piece; else nothing is registered."""

    is_staged = False

    def __init__(self, address: int, size_bytes: int, keeper: Any = None) -> None:
        """`keeper`: what keeps the memory mapped."""
        self._keeper = keeper
        self._buffers: list[memoryview] = []
        if size_bytes > 0:
            self._buffers.append(memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B"))

    @classmethod
    def of_allocator(cls, allocator: Any) -> CacheMemory:
        """Of the in-process mode's allocator."""
        tensor = getattr(allocator, "buffer", None)
        if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return cls(0, 0)
        return cls(int(tensor.data_ptr()), int(tensor.nbytes), tensor)

    def buffers(self) -> Sequence[memoryview]:
        """The memory."""
        return self._buffers

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """It never changes."""
