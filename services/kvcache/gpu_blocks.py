"""KV blocks in GPU memory behind the mover's interface: all slices of a batch in one launch, through pinned memory.

Idea: the mover wants host bytes. Reading gathers the batch's slices into a pinned buffer behind the event that the
engine's stream recorded after the step; writing scatters the buffer behind the event of the order, so that nothing is
overwritten that an earlier step still reads. The engine's stream is never made to wait. The kernel computes the CRC-32C
of each block in the same pass, and one block of each batch, another one each time, is compared with what the processor
sees in the pinned buffer: a bus or a kernel that changes bytes does not stay unnoticed, at a small part of the cost of
reading everything twice.

The invariant: no wait is longer than its deadline, and nothing is given back that a copy may still touch. A buffer that
is read too long is kept aside (mooncache.client.staging) and its blocks may go: what came of them is not used. Blocks
that are written too long stay the caller's until the device is through with them, which `InDoubt` says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncache import _native
from mooncache.client import staging
from mooncache.client.native_call import call_native
from mooncache.client.staging import Stagers
from mooncache.errors import ChecksumMismatch, InvalidArgument, MooncacheError
from mooncache.kvcache.memory import Fence, InDoubt

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


class GpuBlocks:
    """KV blocks in GPU memory. Implements mooncache.kvcache.memory.BlockMemory.

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
        self.block_bytes = sum(length for layer in layers for _, length in layer.segments)
        self._layers = tuple(layers)
        self._ordinal = ordinal
        self._owner = owner
        self._record = record
        self._stagers = Stagers(slots=1)
        self._turn = itertools.count()

    def buffers(self) -> tuple[memoryview, ...]:
        """None: pinned buffers come and go with the threads that use them."""
        return ()

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
        stager = self._take(blocks)
        try:
            crcs = self._copy(stager, blocks, fence, deadline_s, into=False)
        except MooncacheError:
            if not stager.settled(0):
                self._stagers.give_up(self._ordinal, stager, (0,), self._owner)
            raise
        views = self._views(stager, len(blocks))
        self._compare(crcs, views)
        yield views

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
        views = self._views(stager, len(blocks))
        yield views
        try:
            crcs = self._copy(stager, blocks, fence, deadline_s, into=True)
        except MooncacheError as error:
            if stager.settled(0):
                raise
            kept = self._stagers.give_up(self._ordinal, stager, (0,), self._owner)
            raise InDoubt(error, kept.settled) from error
        self._compare(crcs, views)

    def _take(self, blocks: Sequence[int]) -> GpuStager:
        for block in blocks:
            if not 0 <= block < self.block_count:
                raise InvalidArgument(f"there is no block {block}")
        return self._stagers.take(self._ordinal, len(blocks) * self.block_bytes)

    def _copy(
        self, stager: GpuStager, blocks: Sequence[int], fence: Fence | None, deadline_s: float, *, into: bool
    ) -> list[int]:
        slices = [
            [
                (layer.address + block * layer.step_bytes + offset, length)
                for layer in self._layers
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

    def _views(self, stager: GpuStager, count: int) -> list[list[memoryview]]:
        whole = staging.pinned(stager, 0)
        size = self.block_bytes
        return [[whole[index * size : (index + 1) * size]] for index in range(count)]

    def _compare(self, crcs: Sequence[int], views: Sequence[Sequence[memoryview]]) -> None:
        if not crcs:
            return  # copies without a kernel
        index = next(self._turn) % len(crcs)
        if _native.crc32c(views[index][0]) != crcs[index]:
            raise ChecksumMismatch(
                "The bytes of a block changed during the copy between the GPU and pinned memory."
            )
