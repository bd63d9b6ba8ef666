"""Anything that holds bytes becomes something the native core can read or fill without a copy.

GPU memory is taken too (mooncache.client.device).

Accepted on the host: objects with the buffer protocol (bytes, bytearray, memoryview, NumPy arrays, mmap, array),
objects with `__dlpack__` (torch, JAX and friends, on the host), and lists of those (one block, many slices).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mooncache.client.device import BlockPart, DeviceView, device_view, parts_of
from mooncache.client.dlpack import dlpack_view
from mooncache.errors import InvalidArgument

MAX_SLICES = 65_536
_HOST_TYPES = (bytes, bytearray, memoryview, str)

Buffer = Any
"""A bytes-like object, a NumPy array or a tensor with DLPack."""


def _is_flat(view: memoryview) -> bool:
    return view.ndim == 1 and view.format == "B" and view.c_contiguous


def to_view(buffer: Buffer, *, writable: bool) -> memoryview:
    """A flat view of bytes over `buffer`, sharing its memory.

    Raises:
        InvalidArgument: not a buffer, not contiguous, or read-only where bytes must be written.
    """
    if isinstance(buffer, str):
        raise InvalidArgument("A value must be bytes-like, got str. Encode it first: text.encode().")
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        if not hasattr(buffer, "__dlpack__"):
            raise InvalidArgument(
                f"{type(buffer).__name__} holds no bytes that can be shared. Pass bytes, bytearray, memoryview, "
                "a NumPy array or a host tensor."
            ) from error
        return dlpack_view(buffer)
    if not view.c_contiguous:
        raise InvalidArgument(
            "The buffer is not contiguous. Pass a contiguous copy, or its slices one by one."
        )
    if writable and view.readonly:
        raise InvalidArgument("The destination is read-only. Pass a bytearray or a writable array.")
    if _is_flat(view):
        return view
    if view.nbytes == 0:
        return memoryview(bytearray())
    return view.cast("B")


def to_part(buffer: Buffer, *, writable: bool) -> BlockPart:
    """A view of bytes over host memory, or the range of GPU memory. Raises InvalidArgument as to_view does."""
    try:
        if type(buffer) is memoryview and not writable and _is_flat(buffer):
            return buffer  # looked at once: a save has thousands of them
    except ValueError:
        pass  # it was released: to_view says so
    found = None if isinstance(buffer, _HOST_TYPES) else device_view(buffer, writable=writable)
    return to_view(buffer, writable=writable) if found is None else found


def to_slices(buffers: Iterable[Buffer], *, writable: bool) -> list[BlockPart]:
    """Views over the slices of one block, in order."""
    slices = [to_part(buffer, writable=writable) for buffer in buffers]
    if not slices:
        raise InvalidArgument("A list of slices must not be empty.")
    if len(slices) > MAX_SLICES:
        raise InvalidArgument(f"A block may have at most {MAX_SLICES} slices; got {len(slices)}.")
    return slices


def to_source(value: Buffer) -> BlockPart | list[BlockPart]:
    """One value of a put: a buffer, or a list or tuple of buffers that follow each other."""
    if isinstance(value, (list, tuple)):
        return to_slices(value, writable=False)
    return to_part(value, writable=False)


def to_host_source(value: Buffer) -> BlockPart | list[BlockPart]:
    """As to_source, where GPU memory cannot be taken (writes into a reservation). Raises InvalidArgument for it."""
    source = to_source(value)
    if any(type(part) is DeviceView for part in parts_of(source)):
        raise InvalidArgument("A reservation is written from host memory; use put, which takes GPU memory.")
    return source


def to_destination(value: Buffer) -> BlockPart | list[BlockPart]:
    """One destination of a get: a writable buffer, or a list or tuple of them."""
    if isinstance(value, (list, tuple)):
        return to_slices(value, writable=True)
    return to_part(value, writable=True)


def size_bytes(value: BlockPart | Sequence[BlockPart]) -> int:
    """Bytes of a prepared source or destination."""
    return sum(piece.nbytes for piece in parts_of(value))
