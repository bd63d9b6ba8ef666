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

from mooncache.simulate.cache.base import NO_INFO, UseInfo, leading_run


def remember(ghosts: OrderedDict[int, None], block: int, places: int) -> None:
    """The newest `places` evictions are kept."""
    ghosts[block] = None
    while len(ghosts) > places:
        ghosts.popitem(last=False)


class TwoQueues:
    """The policy 2Q. The values of the queues are the times at which the blocks came."""

    def __init__(
        self,
        capacity_blocks: int,
        probation_percent: int = 50,
        ghost_factor: int = 4,
        correlated_s: float = 2.0,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self._probation_percent = probation_percent
        self._ghosts_max = ghost_factor * capacity_blocks
        self._correlated_s = correlated_s
        self._probation: OrderedDict[int, float] = OrderedDict()
        self._protected: OrderedDict[int, float] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

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

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        return leading_run(self, blocks)

    def discard(self, block: int) -> None:
        self._probation.pop(block, None)
        self._protected.pop(block, None)

    def held(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block in self]

    def __contains__(self, block: int, /) -> bool:
        return block in self._protected or block in self._probation

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)


class S3Fifo:
    """The policy S3-FIFO. `small_percent` of the capacity is for newcomers; uses are counted up to three."""

    def __init__(self, capacity_blocks: int, small_percent: int = 10) -> None:
        self.capacity_blocks = capacity_blocks
        self._small_max = capacity_blocks * small_percent // 100
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

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

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        return leading_run(self, blocks)

    def discard(self, block: int) -> None:
        self._small.pop(block, None)
        self._main.pop(block, None)

    def held(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block in self]

    def __contains__(self, block: int, /) -> bool:
        return block in self._small or block in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
