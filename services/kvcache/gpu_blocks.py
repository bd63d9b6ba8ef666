"""KV blocks in GPU memory behind the mover's interface: all slices of a batch in one launch, through pinned memory.

Idea: the mover wants host bytes. Reading gathers the batch's slices into a pinned buffer behind the event that the
engine's stream recorded after the step; writing scatters the buffer behind the event of the order, so that nothing is
overwritten that an earlier step still reads. The engine's stream is never made to wait. The kernel computes the CRC-32C
of each block in the same pass, and one block of each batch, another one each time, is compared with what the processor
sees in the pinned buffer: a bus or a kernel that changes bytes does not stay unnoticed, at a small part of the cost of
reading everything twice. Each thread's pinned buffer is one of `buffers()`, so that RDMA devices read and write it
without a copy into another one.

The invariant: no wait is longer than its deadline, and nothing is given back that a copy may still touch. A buffer that
is read too long is kept aside (mooncache.client.staging) and its blocks may go: what came of them is not used. Blocks
that are written too long stay the caller's until the device is through with them, which `InDoubt` says.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncache import _native
from mooncache.client import staging
from mooncache.client.native_call import call_native
from mooncache.client.reservation import StridedBuffer
from mooncache.client.staging import Stagers
from mooncache.errors import ChecksumMismatch, InvalidArgument, MooncacheError
from mooncache.kvcache.memory import Fence, InDoubt, LayerBytes

if TYPE_CHECKING:
    from mooncache._native import GpuStager


@dataclass(frozen=True, slots=True)
class Ranges:
    """One layer's part of the blocks: block b has bytes [address + b * step + offset, + length) for each segment."""

    address: int
    step_bytes: int
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GpuFence(Fence):
    """An event that the engine's stream records, kept alive here, and its CUDA handle."""

    event: object
    handle: int


class PinnedBuffers:
    """The pinned buffer that each thread uses now, and who wants to know when there are others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_thread: dict[int, tuple[GpuStager, memoryview]] = {}
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the thread that uses another buffer, before it does."""
        self._changed = changed

    def use(self, stager: GpuStager) -> None:
        """From now on this thread's buffer is that of the stager."""
        me = threading.get_ident()
        with self._lock:
            if me in self._by_thread and self._by_thread[me][0] is stager:
                return
            self._by_thread[me] = stager, staging.pinned(stager, 0)
        self._changed()

    def give_up(self) -> None:
        """This thread has no buffer now."""
        with self._lock:
            self._by_thread.pop(threading.get_ident(), None)
        self._changed()

    def views(self) -> tuple[memoryview, ...]:
        """All of them."""
        with self._lock:
            return tuple(view for _, view in self._by_thread.values())


class GpuBlocks:
    """KV blocks in GPU memory. Implements mooncache.kvcache.memory.LayerMemory.

    Args:
        layers: the ranges in the order in which a block stores them.
        ordinal: the GPU.
        owner: keeps the memory alive.
        record: records an event behind what the engine's stream has, and returns it with its CUDA handle.
    """

    is_staged = True

    def __init__(
        self,
        layers: Sequence[Ranges],
        block_count: int,
        *,
        ordinal: int,
        owner: object,
        record: Callable[[], tuple[object, int]] | None = None,
    ) -> None:
        self.block_count = block_count
        self.layer_bytes = [sum(length for _, length in layer.segments) for layer in layers]
        self.block_bytes = sum(self.layer_bytes)
        self._layers = tuple(layers)
        self._ordinal = ordinal
        self._owner = owner
        self._record = record
        self._stagers = Stagers(slots=1)
        self._pinned = PinnedBuffers()
        self._turn = itertools.count()

    def bytes_of(self, blocks: Sequence[int]) -> int:
        return len(blocks) * self.block_bytes

    def buffers(self) -> tuple[memoryview, ...]:
        """The pinned buffers of the threads that have moved blocks."""
        return self._pinned.views()

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """A thread gets its buffer when it moves blocks first, and another one for more blocks at a time."""
        self._pinned.on_change(changed)

    def fence(self) -> GpuFence | None:
        """An event behind everything that the engine has enqueued so far."""
        return None if self._record is None else GpuFence(*self._record())

    @contextmanager
    def reading(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> Iterator[list[list[memoryview]]]:
        """Bytes of the blocks as the fence left them.

        Raises:
            DeadlineExceeded: the device did not bring them in time. They may be given back all the same.
            ChecksumMismatch: what arrived is not what the device read.
        """
        stager = self._read(self._layers, blocks, fence, deadline_s)
        yield [[view] for view in _views(stager, len(blocks), self.block_bytes)]

    @contextmanager
    def reading_layer(
        self, layer: int, blocks: Sequence[int | None], fence: Fence | None, deadline_s: float
    ) -> Iterator[LayerBytes]:
        """As `reading`, of one layer; all blocks that are wanted are gathered at once."""
        wanted = [block for block in blocks if block is not None]
        stager = self._read(self._layers[layer : layer + 1], wanted, fence, deadline_s)
        number, size = itertools.count(), self.layer_bytes[layer]
        places = [None if block is None else next(number) for block in blocks]
        yield LayerBytes(StridedBuffer(staging.pinned(stager, 0), size, [(0, size)]), places)

    @contextmanager
    def writing(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> Iterator[list[list[memoryview]]]:
        """Places for the blocks' bytes, which have arrived in the device when the context is left.

        Raises:
            InDoubt: the device may still write into the blocks.
            ChecksumMismatch: what the device took is not what was there.
        """
        stager = self._take(blocks)
        views = _views(stager, len(blocks), self.block_bytes)
        yield [[view] for view in views]
        try:
            crcs = self._copy(stager, self._layers, blocks, fence, deadline_s, into=True)
        except MooncacheError as error:
            if stager.settled(0):
                raise
            raise InDoubt(error, self._give_up(stager)) from error
        self._compare(crcs, views)

    def _take(self, blocks: Sequence[int]) -> GpuStager:
        for block in blocks:
            if not 0 <= block < self.block_count:
                raise InvalidArgument(f"there is no block {block}")
        stager = self._stagers.take(self._ordinal, len(blocks) * self.block_bytes)
        self._pinned.use(stager)
        return stager

    def _give_up(self, stager: GpuStager) -> Callable[[], bool]:
        """The device may still touch the buffer: it is kept aside, and the answer says whether that has ended."""
        self._pinned.give_up()
        return self._stagers.give_up(self._ordinal, stager, (0,), self._owner).settled

    def _read(
        self, layers: Sequence[Ranges], blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> GpuStager:
        """The stager that has these layers of the blocks, one block behind the other."""
        stager = self._take(blocks)
        try:
            crcs = self._copy(stager, layers, blocks, fence, deadline_s, into=False)
        except MooncacheError:
            if not stager.settled(0):
                self._give_up(stager)
            raise
        size = sum(length for layer in layers for _, length in layer.segments)
        self._compare(crcs, _views(stager, len(blocks), size))
        return stager

    def _copy(
        self,
        stager: GpuStager,
        layers: Sequence[Ranges],
        blocks: Sequence[int],
        fence: Fence | None,
        deadline_s: float,
        *,
        into: bool,
    ) -> list[int]:
        slices = [
            [
                (layer.address + block * layer.step_bytes + offset, length)
                for layer in layers
                for offset, length in layer.segments
            ]
            for block in blocks
        ]
        if fence is not None:
            assert isinstance(fence, GpuFence)
            call_native(stager.follow, 0, fence.handle)
        try:
            staging.start(stager, 0, slices, into=into, crc=True)
        except MooncacheError:
            staging.wait(
                stager, 0, time.monotonic()
            )  # some copies may be under way; raises what start raised
            raise
        return staging.wait(stager, 0, deadline_s)

    def _compare(self, crcs: Sequence[int], views: Sequence[memoryview]) -> None:
        if not crcs:
            return  # copies without a kernel
        index = next(self._turn) % len(crcs)
        if _native.crc32c(views[index]) != crcs[index]:
            raise ChecksumMismatch(
                "The bytes of a block changed during the copy between the GPU and pinned memory."
            )


def _views(stager: GpuStager, count: int, size_bytes: int) -> list[memoryview]:
    """The first so many pieces of that size in the stager's buffer."""
    whole = staging.pinned(stager, 0)
    return [whole[index * size_bytes : (index + 1) * size_bytes] for index in range(count)]
