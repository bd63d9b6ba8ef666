"""KV memory of several groups of layers, each with blocks of its own size, seen as one.

Idea: an engine gives each block to one group at a time, so groups may lie in the same bytes. A block is named by its
group and its number there, put together into one number (`place`), with which everything that moves blocks goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from mooncache.errors import InvalidArgument
from mooncache.kvcache.memory import BlockMemory, Fence, Region, united

Views = list[list[memoryview]]


class GroupedMemory:
    """The blocks of all groups. Implements mooncache.kvcache.memory.BlockMemory.

    Attributes:
        block_bytes: of the largest group.
        block_count: of all groups together.
    """

    def __init__(self, groups: Sequence[BlockMemory]) -> None:
        """`groups` have equally many blocks, on the same device."""
        if not groups or len({memory.block_count for memory in groups}) != 1:
            raise InvalidArgument("groups of KV must have the same number of blocks")
        self._groups = tuple(groups)
        self._each = groups[0].block_count
        self.block_count = self._each * len(groups)
        self.block_bytes = max(memory.block_bytes for memory in groups)
        self.is_staged = any(memory.is_staged for memory in groups)

    def place(self, group: int, block: int) -> int:
        """The number of a block of one group. Raises InvalidArgument for one that does not exist."""
        if not (0 <= group < len(self._groups) and 0 <= block < self._each):
            raise InvalidArgument(f"there is no block {block} of group {group}")
        return group * self._each + block

    def bytes_of(self, blocks: Sequence[int]) -> int:
        return sum(self._groups[block // self._each].block_bytes for block in blocks)

    def buffers(self) -> list[memoryview]:
        """Without what lies in another one: groups share their bytes."""
        found = [view for memory in self._groups for view in memory.buffers()]
        places = (
            Region(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes, view) for view in found
        )
        return [region.view() for region in united(list(places))]

    def on_new_buffers(self, changed: Callable[[], None]) -> None:
        for memory in self._groups:
            memory.on_new_buffers(changed)

    def fence(self) -> Fence | None:
        """All groups are written by the same steps."""
        return self._groups[0].fence()

    def reading(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> AbstractContextManager[Views]:
        return self._together(blocks, lambda memory, own: memory.reading(own, fence, deadline_s))

    def writing(
        self, blocks: Sequence[int], fence: Fence | None, deadline_s: float
    ) -> AbstractContextManager[Views]:
        """As the groups' own. When one of them fails on leaving, the others' blocks may have come or not."""
        return self._together(blocks, lambda memory, own: memory.writing(own, fence, deadline_s))

    @contextmanager
    def _together(
        self,
        blocks: Sequence[int],
        enter: Callable[[BlockMemory, list[int]], AbstractContextManager[Views]],
    ) -> Iterator[Views]:
        by_group: dict[int, list[int]] = {}
        for at, block in enumerate(blocks):
            if not 0 <= block < self.block_count:
                raise InvalidArgument(f"there is no block {block}")
            by_group.setdefault(block // self._each, []).append(at)
        views: Views = [[] for _ in blocks]
        with ExitStack() as stack:
            for group, positions in by_group.items():
                own = [blocks[at] % self._each for at in positions]
                for at, view in zip(
                    positions, stack.enter_context(enter(self._groups[group], own)), strict=True
                ):
                    views[at] = view
            yield views
