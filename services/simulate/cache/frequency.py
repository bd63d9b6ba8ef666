"""Policies that order blocks by how often they were used: LFU, with and without a memory, and length-aware.

Idea: a heap of (rank, number, block); a use pushes a new entry and leaves the old one to be skipped. The
number grows with each push, so equals go in the order of their last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from mooncache.simulate.cache.base import NO_INFO, CacheTable, UseInfo


class Lfu(CacheTable):
    """The block with the fewest uses goes; `history`: uses are counted on after a block left."""

    def __init__(self, capacity_blocks: int, history: bool = False) -> None:
        self._history = history
        self._uses: dict[int, int] = {}
        self._number: dict[int, int] = {}  # of the valid heap entry of each resident block
        super().__init__(capacity_blocks, self._number)
        self._heap: list[tuple[int, int, int]] = []
        self._pushed = 0

    def _rank(self, uses: int, position: int) -> int:
        return uses

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        kept = blocks[: self.capacity_blocks]
        gone = self._make_room(kept)
        for at in range(len(kept) - 1, -1, -1):
            block = kept[at]
            uses = self._uses[block] = self._uses.get(block, 0) + 1
            self._pushed += 1
            self._number[block] = self._pushed
            heappush(self._heap, (self._rank(uses, info.first + at), self._pushed, block))
        if len(self._heap) > 4 * len(self._number) + 1024:
            self._heap = [entry for entry in self._heap if self._number.get(entry[2]) == entry[1]]
            heapify(self._heap)
        return gone

    def _make_room(self, wanted: Sequence[int]) -> list[int]:
        """Evicts others until the wanted blocks fit: else no newcomer would ever live to be used twice."""
        gone: list[int] = []
        spared: list[tuple[int, int, int]] = []
        surplus = (
            len(self._number) + sum(block not in self._number for block in wanted) - self.capacity_blocks
        )
        chain = set(wanted)
        while surplus > 0:
            entry = heappop(self._heap)
            _, number, block = entry
            if self._number.get(block) != number:
                continue
            if block in chain:
                spared.append(entry)
                continue
            self.discard(block)
            gone.append(block)
            surplus -= 1
        for entry in spared:
            heappush(self._heap, entry)
        return gone

    def discard(self, block: int) -> None:
        if self._number.pop(block, None) is not None and not self._history:
            del self._uses[block]


class LengthAware(Lfu):
    """LFU that, among equals, gives up the block that stands latest in its chain."""

    def _rank(self, uses: int, position: int) -> int:
        return (uses << 32) - position
