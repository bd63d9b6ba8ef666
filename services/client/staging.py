"""Pinned buffers between GPU memory and the native core: one stager for each thread and GPU, and what hangs.

Idea: a wait for the device ends at its deadline, but the copy does not. What the device may still touch, pinned buffers
and the arrays that were given to it, is kept here until its stream is empty, even when its owner has let go of it, and
its thread gets a fresh stager. A device that never comes back is refused more memory after `KEPT_BYTES_MAX`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncache import _native
from mooncache.client.native_call import call_native
from mooncache.errors import BackPressure
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
SLOT_BYTES = 32 << 20
KEPT_BYTES_MAX = 1 << 30
# What a copy that is under way may take when the deadline has passed: longer than any buffer on any bus.
GRACE_S = 0.2

Slices = Sequence[Sequence[tuple[int, int]]]
"""For each block its (address, bytes); address 0 is a gap."""


def find_nvrtc() -> str:
    """NVRTC of an installed wheel, "" when there is none: the linker's own places are looked at in any case."""
    for folder in sys.path:
        found = sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.1?"))
        if found:
            return str(found[-1])
    return ""


def open_device(ordinal: int) -> _native.GpuDevice:
    """The device by its ordinal, as the native core opens it."""
    return call_native(_native.GpuDevice, ordinal, "", find_nvrtc())


@dataclass(slots=True)
class _Kept:
    stager: _native.GpuStager
    slots: tuple[int, ...]
    owners: object

    def settled(self) -> bool:
        return all(self.stager.settled(slot) for slot in self.slots)

    def size_bytes(self) -> int:
        return int(self.stager.slots * self.stager.slot(0)[1])


class UnfinishedCopies:
    """Stagers whose copies did not end in time, with what they copy from or to. Thread-safe; one for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []

    def keep(self, stager: _native.GpuStager, slots: Sequence[int], owners: object) -> _Kept:
        kept = _Kept(stager, tuple(slots), owners)
        with self._lock:
            self._kept.append(kept)
        return kept

    def size_bytes(self) -> int:
        """Pinned bytes that the device may still touch; what it is through with is let go of."""
        with self._lock:
            # Dropped at the end, outside of the lock: the driver may take its time to free memory.
            before = self._kept
            self._kept = [one for one in before if not one.settled()]
            return sum(one.size_bytes() for one in self._kept)


UNFINISHED_COPIES = UnfinishedCopies()


class Stagers:
    """The stagers of all threads and GPUs. Nothing is opened before the first `take`."""

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots
        self._devices: dict[int, _native.GpuDevice] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def device(self, ordinal: int) -> _native.GpuDevice:
        """Raises TransportUnavailable: no CUDA here."""
        with self._lock:
            if ordinal not in self._devices:
                self._devices[ordinal] = open_device(ordinal)
            return self._devices[ordinal]

    def take(self, ordinal: int, need_bytes: int) -> _native.GpuStager:
        """This thread's stager, with buffers of at least so many bytes.

        Raises:
            BackPressure: the device has not ended too many copies that were given up.
            NoSpace: no memory can be pinned.
        """
        kept = self._mine()
        size, stager = kept.get(ordinal, (0, None))
        if stager is None or size < need_bytes:
            held = UNFINISHED_COPIES.size_bytes()
            if held > KEPT_BYTES_MAX:
                raise BackPressure(f"The GPU still runs abandoned copies of {held} bytes.")
            first = stager is None
            stager = None
            kept.pop(ordinal, None)
            size = max(SLOT_BYTES, need_bytes)
            device = self.device(ordinal)
            stager = call_native(device.make_stager, size, self._slots)
            kept[ordinal] = (size, stager)
            if first:
                _log.info(Event.CLIENT_GPU_STAGING, device=device.name, how=stager.how)
        return stager

    def give_up(self, ordinal: int, stager: _native.GpuStager, slots: Sequence[int], owners: object) -> _Kept:
        """Keep the stager and `owners` until the device is through with the slots. This thread gets another one."""
        self._mine().pop(ordinal, None)
        return UNFINISHED_COPIES.keep(stager, slots, owners)

    def _mine(self) -> dict[int, tuple[int, _native.GpuStager]]:
        mine: dict[int, tuple[int, _native.GpuStager]] = self._local.__dict__.setdefault("stagers", {})
        return mine


def start(stager: _native.GpuStager, slot: int, slices: Slices, *, into: bool, crc: bool) -> None:
    """Begin to copy all slices out of the device into the slot's first bytes, or from there into the device."""
    begin = stager.start_in if into else stager.start_out
    flat = [piece for block in slices for piece in block]
    call_native(begin, slot, flat, [len(block) for block in slices], crc)


def wait(stager: _native.GpuStager, slot: int, end_s: float) -> list[int]:
    """Until the slot's copies are through, with a little grace: the CRC-32C of each block, empty without a kernel.

    Raises:
        DeadlineExceeded: they may still be under way.
    """
    return call_native(stager.wait, slot, max(end_s - time.monotonic(), GRACE_S))


def pinned(stager: _native.GpuStager, slot: int) -> memoryview:
    """The slot's memory. It lives as long as a view of it."""
    address, size = stager.slot(slot)
    array: Any = (ctypes.c_uint8 * size).from_address(address)
    array._mooncache_owner = stager
    return memoryview(array).cast("B")
