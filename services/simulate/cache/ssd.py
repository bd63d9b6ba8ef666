"""The SSD tier of a simulated node: what a store node would keep on its disk, by the store node's own decisions.

Idea: what memory evicts is offered to the disk, which takes it or not: by how likely it is used again, where the
policy of the memory says so, else by whether it was read in memory and by what is left of the write budget. The disk
is a log of segments, the oldest of which is given up. All of that is decided in native code
(native/src/store/disk/admission.h), the same functions that a running node calls.
A block that is used comes up and stays on the disk, so its next eviction from memory costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mooncache import _native
from mooncache.simulate.cache.base import NodeCache
from mooncache.simulate.cache.reuse import Reuse

_UNKNOWN: Final = -1.0


class SsdTier:
    """Blocks on the disk of one node, below the memory `dram`."""

    def __init__(
        self, dram: NodeCache, blocks: int, block_bytes: int, write_bytes_per_s: float = 0.0
    ) -> None:
        self._dram = dram
        self._disk = _native.DiskModel(blocks * block_bytes, block_bytes, round(write_bytes_per_s))
        self._read: set[int] = set()  # blocks that were used in memory since they came
        self._chances = dram.chances if isinstance(dram, Reuse) else {}

    def used(self, blocks: Sequence[int]) -> None:
        """A chain is about to be used: those of its blocks that are in memory are read there, others on the disk."""
        for block in blocks:
            if block in self._dram:
                self._read.add(block)
            else:
                self._disk.touch(block)

    def take(self, evicted: Iterable[int], now_s: float) -> list[int]:
        """Memory has no room for these blocks. Returns those that are nowhere now, of these and of what the disk gave
        up for them."""
        nowhere: list[int] = []
        for block in evicted:
            chance = self._chances.pop(block, _UNKNOWN)
            hits = 1 if block in self._read else 0
            self._read.discard(block)
            lost = self._disk.offer(block, hits, chance, now_s)
            nowhere += lost if block in self._disk else [*lost, block]
        self._chances.clear()
        return [block for block in nowhere if block not in self._dram and block not in self._disk]

    def discard(self, block: int) -> None:
        """The block is gone."""
        self._disk.discard(block)

    def counts(self) -> dict[str, int]:
        """Bytes written, and blocks by what became of them; names as in a store node's metrics."""
        return self._disk.counts()

    def __contains__(self, block: int, /) -> bool:
        return block in self._disk

    def __len__(self) -> int:
        return len(self._disk)
