"""Where an engine keeps its KV blocks, seen as bytes.

Idea: a block of an engine is a handful of byte ranges, some per layer. Where they are follows from shape and strides
alone, so that every physical order an engine may choose is served by the same arithmetic, and whole blocks move without
anyone knowing what is inside. The order of the ranges is part of the format: it is named in the passport (`describe`).

`HostMemory` gives out views on the engine's own memory, so nothing is copied on the way to the pool or back. Memory of
a device needs staging and offers the same interface (`BlockMemory`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mooncache.client.reservation import StridedBuffer
from mooncache.errors import InvalidArgument, MooncacheError

SEGMENTS_MAX = 4096
_POLL_S = 0.01


class Fence:
    """What has to be waited for before blocks may be read or written; only the memory that made it looks inside."""


class BlockMemory(Protocol):
    """What the mover needs from an engine's KV memory. `reading` and `writing` are called by several threads."""

    block_bytes: int
    """Of the largest block; most memories have blocks of one size."""
    block_count: int
    is_staged: bool
    """Blocks pass through memory of its own between the engine's and the client."""

    def bytes_of(self, blocks: Sequence[int]) -> int:
        """The bytes of these blocks together."""

    def buffers(self) -> Sequence[memoryview]:
        """The host memory in which blocks are read and written: worth registering."""

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on whichever thread it is, after `buffers()` has begun to return others."""

    def fence(self) -> Fence | None:
        """Called on the engine's thread: what has to be waited for before the blocks may be read, or written."""

    def reading(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> AbstractContextManager[list[list[memoryview]]]:
        """Bytes of the blocks, one list of slices for each. `deadline_s` is a time of time.monotonic()."""

    def writing(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> AbstractContextManager[list[list[memoryview]]]:
        """Places for the blocks' bytes; what was written has arrived when the context is left.

        Raises:
            InDoubt: on leaving; a copy into the blocks may still be under way.
        """


class LayerBytes(NamedTuple):
    """One layer's part of some blocks, as `ReservationBatch.write_gathered` takes it."""

    source: StridedBuffer
    places: Sequence[int | None]
    """Where each block's part is in `source`; None: that block is not wanted."""


class LayerMemory(BlockMemory, Protocol):
    """KV memory from which blocks can be saved layer by layer."""

    @property
    def layer_bytes(self) -> Sequence[int]:
        """Of each layer, the bytes that a block has there."""

    def reading_layer(
        self, layer: int, blocks: Sequence[int | None], fence: Fence | None, deadline_s: float
    ) -> AbstractContextManager[LayerBytes]:
        """One layer's bytes of the blocks as the fence left them. Errors are those of `reading`."""


def staged_of(memory: BlockMemory, staged_bytes: int, moved_bytes: int) -> int:
    """Of so many bytes that moved, those that were staged: by the client, or all of them by the memory itself."""
    return moved_bytes if memory.is_staged else min(staged_bytes, moved_bytes)


class InDoubt(Exception):  # noqa: N818  (a state, and never the caller's: the mover of blocks waits for its end)
    """A copy into blocks failed with `error` and may still go on until `settled()`: they must not be given away."""

    def __init__(self, error: MooncacheError, settled: Callable[[], bool]) -> None:
        super().__init__(str(error))
        self.error = error
        self.settled = settled

    def wait(self, given_up: Callable[[float], bool]) -> None:
        """Until the copy has ended; `given_up(pause_s)` pauses, and says True when no caller is left waiting."""
        while not self.settled():
            if given_up(_POLL_S):
                return


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's tensor: its first dimension counts (kernel) blocks. Strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    def kernel_blocks(self, block_count: int) -> int:
        """How many entries of the first dimension make one block of the engine's manager.

        Raises:
            InvalidArgument: they do not divide.
        """
        if block_count < 1 or self.shape[0] < block_count or self.shape[0] % block_count:
            raise InvalidArgument(f"{self.shape[0]} kernel blocks do not make {block_count} blocks")
        return self.shape[0] // block_count

    def segments(self, block_count: int) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the ranges of block 0, in the order of their addresses.

        Raises:
            InvalidArgument: overlapping or absurdly scattered memory.
        """
        sizes = (self.kernel_blocks(block_count), *self.shape[1:])
        dimensions = sorted(
            (stride, size) for stride, size in zip(self.strides, sizes, strict=True) if size > 1
        )
        run = 1
        while dimensions and dimensions[0][0] == run:
            run *= dimensions.pop(0)[1]
        offsets = [0]
        for stride, size in dimensions:
            if stride < run:
                raise InvalidArgument(f"memory of shape {self.shape} and strides {self.strides} overlaps")
            offsets = [offset + index * stride for index in range(size) for offset in offsets]
            if len(offsets) > SEGMENTS_MAX:
                raise InvalidArgument(f"a block has more than {SEGMENTS_MAX} ranges")
        return [(offset * self.item_bytes, run * self.item_bytes) for offset in sorted(offsets)]

    def block_step_bytes(self, block_count: int) -> int:
        """Distance between the beginnings of two blocks."""
        return self.kernel_blocks(block_count) * self.strides[0] * self.item_bytes

    def describe(self, block_count: int) -> str:
        """Shape of one block and the order of its dimensions in memory, independent of how many blocks there are."""
        sizes = (self.kernel_blocks(block_count), *self.shape[1:])
        order = sorted(range(len(sizes)), key=lambda index: (-self.strides[index], index))
        return f"{'x'.join(map(str, sizes))}/{''.join(map(str, order))}"


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of this process. `owner` keeps them alive."""

    address: int
    size_bytes: int
    owner: object

    def view(self) -> memoryview:
        array: Any = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        array._mooncache_owner = self.owner
        return memoryview(array).cast("B")


def united(regions: Sequence[Region]) -> list[Region]:
    """The same bytes in regions that do not overlap: layers may be parts of one allocation."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda one: one.address):
        last = found[-1] if found else None
        if last is not None and region.address < last.address + last.size_bytes:
            end = max(last.address + last.size_bytes, region.address + region.size_bytes)
            found[-1] = Region(last.address, end - last.address, (last.owner, region.owner))
        else:
            found.append(region)
    return found


class HostMemory:
    """KV memory in this process' address space: views on it, no copy."""

    is_staged = False

    def __init__(self, layers: Sequence[tuple[LayerLayout, Region]], block_count: int) -> None:
        """`layers`: layout and memory of each, in the order in which a block stores them."""
        if not layers:
            raise InvalidArgument("an engine without layers has no KV blocks")
        self.block_count = block_count
        self._regions = [region for _, region in layers]
        self._layers: list[tuple[memoryview, int, list[tuple[int, int]]]] = []
        self.layer_bytes: list[int] = []
        for layout, region in layers:
            segments = layout.segments(block_count)
            step = layout.block_step_bytes(block_count)
            end = (block_count - 1) * step + segments[-1][0] + segments[-1][1]
            if end > region.size_bytes:
                raise InvalidArgument(f"blocks end at byte {end} of {region.size_bytes}")
            self._layers.append((region.view(), step, segments))
            self.layer_bytes.append(sum(length for _, length in segments))
        self.block_bytes = sum(self.layer_bytes)

    def bytes_of(self, blocks: Sequence[int]) -> int:
        return len(blocks) * self.block_bytes

    def buffers(self) -> list[memoryview]:
        """All memory in which layers have their blocks."""
        return [region.view() for region in united(self._regions)]

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        """Tensors stay where they are."""

    @contextmanager
    def reading_layer(
        self, layer: int, blocks: Sequence[int | None], fence: Fence | None = None, deadline_s: float = 0.0
    ) -> Iterator[LayerBytes]:
        yield LayerBytes(StridedBuffer(*self._layers[layer]), blocks)

    def slices(self, block: int) -> list[memoryview]:
        """All ranges of one block, layer by layer."""
        self._check([block])
        return [
            view[block * step + offset : block * step + offset + length]
            for view, step, segments in self._layers
            for offset, length in segments
        ]

    def _check(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.block_count:
            raise InvalidArgument(f"there is no block {min(blocks) if min(blocks) < 0 else max(blocks)}")

    def fence(self) -> None:
        """Host memory is written by the engine's own thread: nothing to wait for."""

    @contextmanager
    def reading(
        self, blocks: Sequence[int], fence: Fence | None = None, deadline_s: float = 0.0
    ) -> Iterator[list[list[memoryview]]]:
        yield [self.slices(block) for block in blocks]

    @contextmanager
    def writing(
        self, blocks: Sequence[int], fence: Fence | None = None, deadline_s: float = 0.0
    ) -> Iterator[list[list[memoryview]]]:
        yield [self.slices(block) for block in blocks]
