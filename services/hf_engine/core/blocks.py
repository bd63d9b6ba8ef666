"""Who uses which KV block, and which blocks hold something worth finding again.

Idea: a block is free when no sequence refers to it, but a free block that was published under a key keeps its content
until it is handed out again, oldest first. So the free list is the local prefix cache. Invariant: a block is in the
free list exactly when its reference count is 0, and a key leads to at most one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """The engine's KV blocks: free, held or cached. Blocks are numbers from 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._refs = [0] * count
        self._key: list[bytes | None] = [None] * count
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the leading keys that are here, each with one more reference."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self.hold(block)
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and no key, or None (and no change) when there are not enough."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._key[block]
            if key is not None:
                del self._block_of[key]
                self._key[block] = None
            self._refs[block] = 1
            taken.append(block)
        return taken

    def hold(self, block: int) -> None:
        """One more reference."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each; what is not referred to becomes free, blocks without content first in line."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is released more often than held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._key[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """The block's content is complete and is what `key` names. The first block of a key stays the one found."""
        assert self._refs[block] > 0, f"block {block} is published without a holder"
        if self._key[block] is None and key not in self._block_of:
            self._key[block] = key
            self._block_of[key] = block

    def forget(self) -> None:
        """No block is found from now on; blocks in use stay in use."""
        self._block_of.clear()
        self._key = [None] * self.count

    def check(self) -> None:
        """The invariant."""
        free = {block for block in range(self.count) if self._refs[block] == 0}
        assert free == set(self._free), "free list and references differ"
        assert all(refs >= 0 for refs in self._refs)
        named = {key: block for block, key in enumerate(self._key) if key is not None}
        assert named == self._block_of, "keys and blocks differ"
