"""Policies with a queue for newcomers: 2Q as the store nodes have it, and S3-FIFO.

2Q: a block starts on probation and is protected when it is used again (later than `correlated_s` after it
came) or when it comes back while its eviction is remembered. Probation loses blocks while it holds more than
its share of all. The rules and the defaults are those of native/src/store/eviction.h.
S3-FIFO: newcomers pass through a small queue; those used twice there go to the main queue, those that
come back soon after they fell out too; the main queue gives a used block another round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mooncache.simulate.cache.base import NO_INFO, UseInfo


def remember(ghosts: OrderedDict[int, None], block: int, places: int) -> None:
    """The newest `places` evictions are kept."""
    ghosts[block] = None
    while len(ghosts) > places:
        ghosts.popitem(last=False)


class _Queues:
    """What both policies share: newcomers in one queue, blocks that proved themselves in the other."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._new: OrderedDict[int, Any] = OrderedDict()
        self._proved: OrderedDict[int, Any] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        return sum(1 for _ in takewhile(self.__contains__, blocks))

    def discard(self, block: int) -> None:
        self._new.pop(block, None)
        self._proved.pop(block, None)

    def held(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block in self]

    def __contains__(self, block: int, /) -> bool:
        return block in self._proved or block in self._new

    def __len__(self) -> int:
        return len(self._new) + len(self._proved)


class TwoQueues(_Queues):
    """The policy 2Q. The values of the queues are the times at which the blocks came."""

    def __init__(
        self,
        capacity_blocks: int,
        probation_percent: int = 50,
        ghost_factor: int = 4,
        correlated_s: float = 2.0,
    ) -> None:
        super().__init__(capacity_blocks)
        self._probation, self._protected = self._new, self._proved
        self._probation_percent = probation_percent
        self._ghosts_max = ghost_factor * capacity_blocks
        self._correlated_s = correlated_s

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        fresh: set[int] = set()
        for block in reversed(blocks[: self.capacity_blocks]):
            if block in self._protected:
                self._protected.move_to_end(block)
            elif block in self._probation:
                if now_s - self._probation[block] >= self._correlated_s:
                    self._protected[block] = self._probation.pop(block)
                else:
                    self._probation.move_to_end(block)
            else:
                fresh.add(block)
                known = self._ghosts.pop(block, 0) is None
                (self._protected if known else self._probation)[block] = now_s
        gone: list[int] = []
        while len(self) > self.capacity_blocks:
            share = len(self) * self._probation_percent // 100
            loses = (
                self._probation if len(self._probation) > share or not self._protected else self._protected
            )
            block, _ = loses.popitem(last=False)
            remember(self._ghosts, block, self._ghosts_max)
            gone.append(block)
        return [block for block in gone if block not in fresh]


class S3Fifo(_Queues):
    """The policy S3-FIFO. `small_percent` of the capacity is for newcomers; uses are counted up to three."""

    def __init__(self, capacity_blocks: int, small_percent: int = 10) -> None:
        super().__init__(capacity_blocks)
        self._small, self._main = self._new, self._proved
        self._small_max = capacity_blocks * small_percent // 100

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        fresh: set[int] = set()
        for block in reversed(blocks[: self.capacity_blocks]):
            if block in self._small:
                self._small[block] = min(self._small[block] + 1, 3)
            elif block in self._main:
                self._main[block] = min(self._main[block] + 1, 3)
            else:
                fresh.add(block)
                known = self._ghosts.pop(block, 0) is None
                (self._main if known else self._small)[block] = 0
        gone: list[int] = []
        while len(self) > self.capacity_blocks:
            from_small = len(self._small) > self._small_max or not self._main
            gone += self._drop_small() if from_small else self._drop_main()
        return [block for block in gone if block not in fresh]

    def _drop_small(self) -> list[int]:
        block, uses = self._small.popitem(last=False)
        if uses > 1:
            self._main[block] = 0
            return []
        remember(self._ghosts, block, self.capacity_blocks - self._small_max)
        return [block]

    def _drop_main(self) -> list[int]:
        while True:
            block, uses = self._main.popitem(last=False)
            if uses == 0:
                return [block]
            self._main[block] = uses - 1
