"""The oracle: keeps the blocks whose next use comes soonest, and stores none that another use will not reach.

Idea (Belady's MIN with bypass): with the whole trace known, each reference carries the number of the request that
uses its block next. What is used latest goes, be it the newcomer itself. In a prefix tree a block is used whenever
one behind it is, so prefix hits and block hits coincide. No policy that does not see the future can do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from mooncache.simulate.cache.base import NO_INFO, CacheTable, UseInfo

_NEVER: Final = 1 << 62


class Belady(CacheTable):
    """`use` must be called with the given chains in the given order."""

    def __init__(self, capacity_blocks: int, chains: Sequence[Sequence[int]]) -> None:
        self._next: list[list[int]] = [[] for _ in chains]
        following: dict[int, int] = {}
        for number in range(len(chains) - 1, -1, -1):
            self._next[number] = [following.get(block, _NEVER) for block in chains[number]]
            following.update(dict.fromkeys(chains[number], number))
        self._used = 0
        self._next_use: dict[int, int] = {}
        super().__init__(capacity_blocks, self._next_use)
        # (-next use, -position, block): of blocks used at the same time next the last of the chain goes.
        self._heap: list[tuple[int, int, int]] = []

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        gone: list[int] = []
        fresh: set[int] = set()
        for at, (block, following) in enumerate(zip(blocks, self._next[self._used], strict=True)):
            here = self._next_use.pop(block, None) is not None
            if following == _NEVER:
                if here:
                    gone.append(block)
                continue
            if not here:
                fresh.add(block)
            self._next_use[block] = following
            heappush(self._heap, (-following, -at, block))
            while len(self._next_use) > self.capacity_blocks:
                latest, _, victim = heappop(self._heap)
                if self._next_use.get(victim) == -latest:
                    del self._next_use[victim]
                    gone.append(victim)
        self._used += 1
        return [block for block in gone if block not in fresh]
