"""Buffers in GPU memory as sources and destinations of the client, through pinned host memory.

Anything with `__cuda_array_interface__` (cupy, numba, torch) or DLPack on a CUDA device is taken. A batch is cut into
groups that fit a pinned buffer, and there are two: while the native core moves one group, the device copies the next
one. How the copies are made (all slices in one launch, or one by one) is logged when a device is used first.

The invariant: a pinned buffer is handed on only when the device is through with it, also after an error; device memory
of a get is written only for blocks that came back whole and verified. Work that other streams have enqueued
on the device is waited for before the first copy. No wait for the device is longer than the call's time limit; buffers
and arrays that it may still touch then are kept (mooncache.client.staging).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mooncache.client import staging
from mooncache.client.dlpack import dlpack_range
from mooncache.client.native_call import call_native
from mooncache.client.staging import Stagers
from mooncache.errors import OK, DeadlineExceeded, InvalidArgument, MooncacheError

if TYPE_CHECKING:
    from mooncache._native import GpuDevice, GpuStager

_CUDA, _CUDA_MANAGED = 2, 13  # DLPack's numbers of devices


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A contiguous range of GPU memory; `owner` keeps it alive."""

    address: int
    nbytes: int
    ordinal: int
    owner: object


BlockPart = memoryview | DeviceView
BlockParts = BlockPart | Sequence[BlockPart]
HostParts = Sequence[memoryview | Sequence[memoryview]]
"""What moves in host memory, for each block."""

PutAnswer = tuple[int, int | None, bool]
"""(code, index of the node, whether the call made a copy) of a block that was put."""
GetAnswer = tuple[int, int, int | None]
"""(code, bytes, index of the node) of a block that was read."""
BlockAnswer = TypeVar("BlockAnswer", PutAnswer, GetAnswer)
GroupCall = Callable[[int, int, HostParts, float], Sequence[BlockAnswer]]
"""(begin, end, their parts, limit_s) -> the answers of the blocks from begin to end."""
PUT_LATE: PutAnswer = (DeadlineExceeded.code, None, False)
GET_LATE: GetAnswer = (DeadlineExceeded.code, 0, None)


def device_view(buffer: object, *, writable: bool) -> DeviceView | None:
    """The GPU memory of a buffer, None for what is not in GPU memory.

    Raises:
        InvalidArgument: it is not contiguous, or read-only where bytes must be written.
    """
    try:
        interface = getattr(buffer, "__cuda_array_interface__", None)
    except Exception:  # noqa: BLE001 - torch raises for its host tensors, with classes of its own
        interface = None
    if interface is not None:
        return _from_interface(buffer, interface, writable)
    ask = getattr(buffer, "__dlpack_device__", None)
    if ask is None:
        return None
    try:
        kind, ordinal = map(int, ask())
    except Exception:  # noqa: BLE001 - as above; who takes it as a host buffer says what is wrong
        return None
    if kind not in {_CUDA, _CUDA_MANAGED}:
        return None
    address, size, keep = dlpack_range(buffer)
    return _view(address, size, ordinal, (keep, buffer))


def _view(address: int, size: int, ordinal: int, owner: object) -> DeviceView:
    if size and not address:  # to the native core address 0 is a gap: whatever was staged before would be put
        raise InvalidArgument(f"The array has {size} bytes at address 0.")
    return DeviceView(address, size, ordinal, owner)


def _from_interface(buffer: object, interface: dict[str, Any], writable: bool) -> DeviceView:
    try:
        address, readonly = interface["data"]
        shape = tuple(int(length) for length in interface["shape"])
        item_bytes = int(interface["typestr"][2:])
        strides = interface.get("strides")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidArgument(f"{type(buffer).__name__} has a malformed __cuda_array_interface__.") from error
    if writable and readonly:
        raise InvalidArgument("The destination is read-only. Pass a writable array.")
    size = item_bytes * math.prod(shape)
    expected = item_bytes
    for length, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size and length != 1 and stride != expected:
            raise InvalidArgument(
                "The array is not contiguous. Pass a contiguous copy, or its slices one by one."
            )
        expected *= length
    device = getattr(buffer, "device", None)
    ordinal = getattr(device, "index", None)  # torch; cupy calls it id
    if ordinal is None or callable(ordinal):
        ordinal = getattr(device, "id", 0)
    return _view(int(address or 0), size, int(ordinal or 0), buffer)


def in_device(values: Sequence[BlockParts]) -> bool:
    """Whether any part of any value is in GPU memory."""
    return any(isinstance(part, DeviceView) for value in values for part in parts_of(value))


def parts_of(value: BlockParts) -> Sequence[BlockPart]:
    return (value,) if isinstance(value, (memoryview, DeviceView)) else value


@dataclass(slots=True)
class _Group:
    """Blocks that fit a pinned buffer: their positions, parts with views into the buffer, the device's slices."""

    begin: int
    end: int
    parts: list[Sequence[BlockPart]] = field(default_factory=list)
    host: list[list[memoryview]] = field(default_factory=list)
    slices: list[list[tuple[int, int]]] = field(default_factory=list)


class DeviceStaging:
    """Groups of blocks through the stager of the calling thread. Used by one client."""

    def __init__(self) -> None:
        self._stagers = Stagers()

    def device(self, ordinal: int) -> GpuDevice:
        """The device as the native core opened it. Raises TransportUnavailable: no CUDA here."""
        return self._stagers.device(ordinal)

    def put(
        self, sources: Sequence[BlockParts], limit_s: float, call: GroupCall[PutAnswer]
    ) -> list[PutAnswer]:
        """`call(begin, end, host_parts, limit_s)` puts those blocks; the answers of all, in order.

        Blocks that were not begun within `limit_s` have DEADLINE_EXCEEDED, as in a batch of host buffers.
        """
        return self._run(sources, limit_s, partial(_Putting, call), PUT_LATE)

    def get(
        self, targets: Sequence[BlockParts], limit_s: float, call: GroupCall[GetAnswer]
    ) -> list[GetAnswer]:
        """As put, for a get."""
        return self._run(targets, limit_s, partial(_Getting, call), GET_LATE)

    def _run(
        self,
        values: Sequence[BlockParts],
        limit_s: float,
        direction: Callable[[GpuStager, float], _Moving[BlockAnswer]],
        late: BlockAnswer,
    ) -> list[BlockAnswer]:
        ordinals = {
            part.ordinal for value in values for part in parts_of(value) if isinstance(part, DeviceView)
        }
        if len(ordinals) != 1:
            raise InvalidArgument("The buffers of one call must lie on one GPU; make one call for each.")
        end_s = time.monotonic() + limit_s
        need = max(sum(p.nbytes for p in parts_of(value) if isinstance(p, DeviceView)) for value in values)
        (ordinal,) = ordinals
        stager = self._stagers.take(ordinal, need)
        call_native(self._stagers.device(ordinal).synchronize, max(end_s - time.monotonic(), 0.0))
        groups = self._groups(values, stager)
        move = direction(stager, end_s)
        answers: list[BlockAnswer] = []
        try:
            for number, group in enumerate(groups):
                following = (number + 1, groups[number + 1]) if number + 1 < len(groups) else None
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                answers += move.group(number, group, following, left_s)
            move.end()
        finally:
            if in_doubt := move.give_up():
                self._stagers.give_up(ordinal, stager, in_doubt, values)
        return answers + [late] * (len(values) - len(answers))

    def _groups(self, values: Sequence[BlockParts], stager: GpuStager) -> list[_Group]:
        slot_bytes = stager.slot(0)[1]
        groups: list[_Group] = []
        used = slot_bytes + 1
        for position, value in enumerate(values):
            parts = parts_of(value)
            need = sum(part.nbytes for part in parts if isinstance(part, DeviceView))
            if used + need > slot_bytes:
                groups.append(_Group(position, position))
                used = 0
            group = groups[-1]
            pinned = staging.pinned(stager, (len(groups) - 1) % 2)
            host: list[memoryview] = []
            for part in parts:
                if isinstance(part, DeviceView):
                    host.append(pinned[used : used + part.nbytes])
                    used += part.nbytes
                else:
                    host.append(part)
            group.parts.append(parts)
            group.host.append(host)
            group.slices.append([(p.address, p.nbytes) for p in parts if isinstance(p, DeviceView)])
            group.end = position + 1
        return groups


class _Moving(Generic[BlockAnswer]):
    """What both directions share: which pinned buffers the device may still touch."""

    def __init__(self, call: GroupCall[BlockAnswer], stager: GpuStager, end_s: float) -> None:
        self.stager = stager
        self.busy: set[int] = set()
        self.call: GroupCall[BlockAnswer] = call
        self._end_s = end_s

    def group(
        self, number: int, group: _Group, following: tuple[int, _Group] | None, left_s: float
    ) -> list[BlockAnswer]:
        """Move group `number`; the answers of its blocks."""
        raise NotImplementedError

    def end(self) -> None:
        """Until what was moved has arrived."""

    def start(self, slot: int, slices: list[list[tuple[int, int]]], *, into: bool) -> None:
        self.busy.add(slot)  # also when it fails: some copies may be under way
        staging.start(self.stager, slot, slices, into=into, crc=False)  # the native core computes its own

    def wait(self, slot: int) -> None:
        if slot in self.busy:
            staging.wait(self.stager, slot, self._end_s)
            self.busy.discard(slot)

    def give_up(self) -> list[int]:
        """The buffers that the device did not end with. Their errors say nothing new."""
        for slot in sorted(self.busy):
            with contextlib.suppress(MooncacheError):
                staging.wait(self.stager, slot, self._end_s)
        left = [slot for slot in sorted(self.busy) if not self.stager.settled(slot)]
        self.busy.clear()
        return left


class _Putting(_Moving[PutAnswer]):
    """Group n is put while the device copies group n + 1 out."""

    def group(
        self, number: int, group: _Group, following: tuple[int, _Group] | None, left_s: float
    ) -> list[PutAnswer]:
        if number == 0:
            self.start(0, group.slices, into=False)
        self.wait(number % 2)
        if following is not None:
            self.start(following[0] % 2, following[1].slices, into=False)
        return list(self.call(group.begin, group.end, group.host, left_s))


class _Getting(_Moving[GetAnswer]):
    """Group n + 1 is fetched while the device copies group n in."""

    def end(self) -> None:
        for slot in sorted(self.busy):
            self.wait(slot)

    def group(
        self, number: int, group: _Group, following: tuple[int, _Group] | None, left_s: float
    ) -> list[GetAnswer]:
        slot = number % 2
        self.wait(slot)
        answers = list(self.call(group.begin, group.end, group.host, left_s))
        self.start(
            slot,
            [_arrived(parts, came_bytes(answer)) for parts, answer in zip(group.parts, answers, strict=True)],
            into=True,
        )
        return answers


def came_bytes(answer: GetAnswer) -> int:
    """Bytes of a block that a get brought."""
    code, size, _ = answer
    return size if code == OK else 0


def _arrived(parts: Sequence[BlockPart], size: int) -> list[tuple[int, int]]:
    """The device's slices of a block of which `size` bytes came; what did not come is a gap (address 0)."""
    slices: list[tuple[int, int]] = []
    for part in parts:
        came = min(part.nbytes, max(size, 0))
        size -= came
        if isinstance(part, DeviceView):
            slices.append((part.address, came))
            slices.append((0, part.nbytes - came))
    return [piece for piece in slices if piece[1]]
