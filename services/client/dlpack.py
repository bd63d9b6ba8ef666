"""A view of a DLPack tensor's bytes, without NumPy and without torch.

DLPack hands over a capsule that points to a small C structure. This module reads that structure with ctypes, refuses
what is not contiguous host memory, and offers the bytes through the buffer protocol. It works for dtypes that NumPy
does not know (bfloat16, float8). The capsule is only looked at, never renamed: its own destructor frees it when the
view goes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from mooncache.errors import InvalidArgument

_HOST_DEVICES = {1: "cpu", 3: "cuda host", 11: "rocm host"}
_MAX_DIMENSIONS = 64


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimension_count", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _is_contiguous(shape: list[int], strides: list[int] | None) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _tensor(tensor: Any) -> tuple[Any, Any, int]:
    """(the capsule, its structure, bytes) of a contiguous tensor."""
    try:
        capsule = tensor.__dlpack__()
        address = _get_pointer(capsule, b"dltensor")
    except Exception as error:
        raise InvalidArgument(f"{type(tensor).__name__} cannot be exported by DLPack: {error}") from error
    view = _DlTensor.from_address(address)
    if not 0 <= view.dimension_count <= _MAX_DIMENSIONS:
        raise InvalidArgument(f"The tensor claims {view.dimension_count} dimensions.")
    shape = [view.shape[i] for i in range(view.dimension_count)]
    strides = [view.strides[i] for i in range(view.dimension_count)] if view.strides else None
    if not _is_contiguous(shape, strides):
        raise InvalidArgument(
            "The tensor is not contiguous. Pass tensor.contiguous(), or its slices one by one."
        )
    bit_count = view.dtype.bits * view.dtype.lanes
    for length in shape:
        bit_count *= length
    return capsule, view, (bit_count + 7) // 8


def dlpack_range(tensor: object) -> tuple[int, int, object]:
    """(address, bytes, what keeps them alive) of a contiguous tensor, wherever it is. Raises InvalidArgument."""
    capsule, view, size_bytes = _tensor(tensor)
    return (view.data or 0) + view.byte_offset, size_bytes, capsule


def dlpack_view(tensor: Any) -> memoryview:
    """The bytes of `tensor` as a flat, writable memoryview that shares its memory and keeps it alive.

    Raises:
        InvalidArgument: the tensor is not in host memory, not contiguous, or refuses to be exported.
    """
    capsule, view, size_bytes = _tensor(tensor)
    if view.device.device_type not in _HOST_DEVICES:
        raise InvalidArgument(
            "The tensor is not in host memory. Copy it to the CPU first (for example tensor.cpu())."
        )
    if size_bytes == 0:
        return memoryview(bytearray())
    array: Any = (ctypes.c_uint8 * size_bytes).from_address(view.data + view.byte_offset)
    array._mooncache_owner = (capsule, tensor)  # the bytes live as long as the view does
    return memoryview(array).cast("B")
