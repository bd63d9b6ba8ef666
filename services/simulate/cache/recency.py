"""Policies that order blocks by time alone: LRU (last use), FIFO (arrival), TTL (last use, with an end).

Idea: an ordered dict is the queue, the first key the coldest (a plain dict would look for its first key
among all that left). Each use moves or adds
its blocks last one first, so the root of a chain is always hotter than its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mooncache.simulate.cache.base import NO_INFO, CacheTable, UseInfo


class Lru(CacheTable):
    """The block whose last use is longest ago goes."""

    def __init__(self, capacity_blocks: int) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()
        super().__init__(capacity_blocks, self._queue)

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        queue = self._queue
        kept = blocks[: self.capacity_blocks]
        for block in reversed(kept):
            queue.pop(block, None)
            queue[block] = None
        gone: list[int] = []
        while len(queue) > self.capacity_blocks:
            gone.append(queue.popitem(last=False)[0])
        return gone


class Fifo(Lru):
    """The block that came first goes, used or not. A chain that comes in is stored root last."""

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        queue = self._queue
        for block in reversed(blocks[: self.capacity_blocks]):
            queue.setdefault(block)
        gone: list[int] = []
        while len(queue) > self.capacity_blocks:
            gone.append(queue.popitem(last=False)[0])
        return gone


class Ttl(Lru):
    """LRU whose blocks also go `ttl_s` seconds after their last use (at the next use of the cache)."""

    def __init__(self, capacity_blocks: int, ttl_s: float) -> None:
        super().__init__(capacity_blocks)
        self.ttl_s = ttl_s
        self._used_s: dict[int, float] = {}

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        gone: list[int] = []
        for block in self._queue:
            if self._used_s[block] + self.ttl_s >= now_s:
                break
            gone.append(block)
        for block in gone:
            del self._queue[block]
        gone += super().use(blocks, now_s, info)
        for block in gone:
            del self._used_s[block]
        for block in blocks[: self.capacity_blocks]:
            self._used_s[block] = now_s
        return [block for block in gone if block not in self._queue]

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        count = super().leading(blocks, now_s)
        while count > 0 and self._used_s[blocks[count - 1]] + self.ttl_s < now_s:
            count -= 1
        return count

    def discard(self, block: int) -> None:
        super().discard(block)
        self._used_s.pop(block, None)
