"""Addresses of the caller become buffers: what the original calls zero-copy.

The caller promises that an address is valid for its size until the call returns, and of a registered buffer until it is
taken back. Memory that is registered is looked up in the process's mappings first; elsewhere a wrong address ends the
process, as with the original. A range of a registered buffer is a slice of one view of it, which costs less than a view
of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncache.errors import InvalidArgument

if TYPE_CHECKING:
    from mooncache.client.registered import RegisteredBuffer

_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9  # attributes of cuPointerGetAttribute
_DEVICE_MEMORY = 2
_ADDRESS_END = 1 << 64
_MS_ASYNC = 1  # of msync(2): nothing is written; it only fails with ENOMEM where something is not mapped
_libc = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    index: int


class DeviceRange:
    """A range of GPU memory, in the form that array libraries agree on."""

    __slots__ = ("address", "device", "nbytes")

    def __init__(self, address: int, nbytes: int, ordinal: int) -> None:
        self.address, self.nbytes, self.device = address, nbytes, _OnDevice(ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


ObjectPart = memoryview | DeviceRange


class _RegisteredRange(NamedTuple):
    address: int
    end: int
    whole: ObjectPart
    registered: RegisteredBuffer | None


@cache
def _cuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpu_of(address: int) -> int | None:
    """The GPU (CUDA ordinal) whose memory an address is in; None for host memory."""
    library = _cuda()
    if library is None:
        return None
    found = []
    for attribute in (_MEMORY_TYPE, _DEVICE_ORDINAL):
        value = ctypes.c_uint(0)
        if library.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address)):
            return None
        found.append(value.value)
    kind, ordinal = found
    return ordinal if kind == _DEVICE_MEMORY else None


def _check(address: int, size: int) -> None:
    for value in (address, size):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"An address and a size are ints; got {type(value).__name__}.")
    if address <= 0 or size < 0 or address + size > _ADDRESS_END:
        raise InvalidArgument(f"{size} bytes at address {address:#x} are no memory.")


def view_of(address: int, size: int) -> ObjectPart:
    """A buffer over memory of the caller that is not registered. Raises InvalidArgument for an impossible range."""
    _check(address, size)
    ordinal = gpu_of(address)
    if ordinal is not None:
        return DeviceRange(address, size, ordinal)
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def check_mapped(address: int, size: int) -> None:
    """Raises InvalidArgument when a range is not memory of this process as a whole."""
    _check(address, size)
    first = address - address % mmap.PAGESIZE
    if _libc.msync(first, address + size - first, _MS_ASYNC):
        raise InvalidArgument(f"{size} bytes at {address:#x} are not all memory of this process.")


def part_of(whole: ObjectPart, offset: int, size: int) -> ObjectPart:
    """A range of a part."""
    if isinstance(whole, DeviceRange):
        return DeviceRange(whole.address + offset, size, whole.device.index)
    return whole[offset : offset + size]


class RegisteredBuffers:
    """The registered buffers of one store. Thread-safe; look-ups take no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: tuple[_RegisteredRange, ...] = ()  # by address; replaced whole
        self._starts: tuple[int, ...] = ()

    def _keep(self, regions: Sequence[_RegisteredRange]) -> None:
        self._regions = tuple(sorted(regions, key=lambda region: region.address))
        self._starts = tuple(region.address for region in self._regions)

    def add(self, whole: ObjectPart, address: int, size: int, registered: RegisteredBuffer | None) -> None:
        """Remember a buffer. Raises InvalidArgument when it overlaps one that is there."""
        with self._lock:
            if any(region.address < address + size and address < region.end for region in self._regions):
                raise InvalidArgument(f"{size} bytes at {address:#x} overlap a registered buffer.")
            self._keep([*self._regions, _RegisteredRange(address, address + size, whole, registered)])

    def remove(self, address: int) -> bool:
        """Forget the buffer that begins here; False when none does."""
        with self._lock:
            gone = [region for region in self._regions if region.address == address]
            self._keep([region for region in self._regions if region.address != address])
        for region in gone:
            if region.registered is not None:
                region.registered.close()
        return bool(gone)

    def clear(self) -> None:
        """Forget all."""
        for address in self._starts:
            self.remove(address)

    def _region(self, address: int) -> _RegisteredRange | None:
        regions, starts = self._regions, self._starts
        at = bisect_right(starts, address) - 1
        if not 0 <= at < len(regions):
            return None
        region = regions[at]
        return region if region.address <= address < region.end else None

    def part(self, address: int, size: int) -> ObjectPart:
        """A buffer over a range of the caller's memory, registered or not. Raises InvalidArgument as view_of does."""
        region = self._region(address)
        if region is None:
            return view_of(address, size)
        if size < 0 or address + size > region.end:
            raise InvalidArgument(f"{size} bytes at {address:#x} reach beyond their registered buffer.")
        return part_of(region.whole, address - region.address, size)

    def parts(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[ObjectPart]:
        """The slices of one object. Raises InvalidArgument also for lists of different lengths."""
        if len(addresses) != len(sizes):
            raise InvalidArgument(
                f"{len(addresses)} addresses and {len(sizes)} sizes do not belong together."
            )
        return [self.part(address, size) for address, size in zip(addresses, sizes, strict=True)]

    def room(self, address: int) -> int:
        """Bytes from an address to the end of its registered buffer; 0 when it is in none."""
        region = self._region(address)
        return 0 if region is None else region.end - address


class MooncakeHostMemAllocator:
    """Anonymous host memory by address, for engines that let the store allocate their host pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """Address of zeroed, page-aligned memory; 0 when there is none."""
        try:
            made = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(made))
        with self._lock:
            self._maps[address] = made
        return address

    def free(self, ptr: int) -> int:
        """0, or a negative code for an address that `alloc` did not give."""
        with self._lock:
            made = self._maps.pop(ptr, None)
        if made is None:
            return -600
        made.close()
        return 0
