"""Which rows hold which block: the block -> holders index, and the leading run of a prompt on every row.

Idea: the holders of a block are one integer with a bit for each row. Along a chain the rows that still hold
everything are the running AND, so a walk costs one dict look-up and one AND per block, no matter how many rows
there are; only where the AND changes are rows written down. Few distinct integers exist for single holders, so
they are shared objects.
Invariant: a bit is set exactly while some tier of that row holds the block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FEW = 12  # rows that are cheaper one by one


def rows_of(mask: int) -> list[int]:
    """The numbers of the bits that are set, ascending; meant for a few of them."""
    rows = []
    while mask:
        low = mask & -mask
        rows.append(low.bit_length() - 1)
        mask ^= low
    return rows


def _write(counts: NDArray[np.int64], mask: int, count: int) -> None:
    """Set the counts of the rows whose bits are set."""
    if mask.bit_count() > FEW:
        raw = np.frombuffer(mask.to_bytes((len(counts) + 7) // 8, "little"), dtype=np.uint8)
        flags = np.unpackbits(raw, count=len(counts), bitorder="little")
        counts[flags.view(np.bool_)] = count
        return
    for row in rows_of(mask):
        counts[row] = count


class BlockHolders:
    """Holders of every block that any row holds."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []

    def bit(self, row: int) -> int:
        """The (shared) mask of one row."""
        while row >= len(self._bits):
            self._bits.append(1 << len(self._bits))
        return self._bits[row]

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, block: int) -> int:
        """The mask of the rows that hold the block."""
        return self._holders.get(block, 0)

    def add(self, blocks: Iterable[int], row: int) -> None:
        """The row holds these blocks now."""
        bit, holders = self.bit(row), self._holders
        for block in blocks:
            mask = holders.get(block)
            if mask is None:
                holders[block] = bit
            elif not mask & bit:
                holders[block] = mask | bit

    def remove(self, blocks: Iterable[int], row: int) -> None:
        """The row no longer holds these blocks."""
        bit, holders = self.bit(row), self._holders
        for block in blocks:
            mask = holders.get(block, 0)
            if mask == bit:
                del holders[block]
            elif mask & bit:
                mask ^= bit
                holders[block] = mask if mask & (mask - 1) else self.bit(mask.bit_length() - 1)

    def forget_row(self, row: int) -> int:
        """The row is gone with all it held; returns how many blocks it held. Costs a walk over the index."""
        bit = self.bit(row)
        lost = [block for block, mask in self._holders.items() if mask & bit]
        self.remove(lost, row)
        return len(lost)

    def leading(
        self, blocks: Sequence[int], rows: int, block_tokens: int = 1, tokens_max: int = sys.maxsize
    ) -> tuple[NDArray[np.int64], int, int]:
        """(leading tokens on each row, the longest run in blocks, mask of the rows that have it).

        Without block_tokens they are blocks. tokens_max: of the prompt, whose last block may not be full.
        """
        counts = np.zeros(rows, dtype=np.int64)
        holders = self._holders
        mask = -1
        depth = 0
        for block in blocks:
            held = holders.get(block, 0)
            both = mask & held
            if both != mask:
                if depth:
                    _write(counts, mask ^ both, min(depth * block_tokens, tokens_max))
                if not both:
                    return counts, depth, mask if depth else 0
                mask = both
            depth += 1
        if depth:
            _write(counts, mask, min(depth * block_tokens, tokens_max))
        return counts, depth, mask if depth else 0

    def leading_on(self, blocks: Sequence[int], row: int, begin: int) -> int:
        """The leading blocks on one row, when the first `begin` are known to be there."""
        bit, holders = self.bit(row), self._holders
        for depth in range(begin, len(blocks)):
            if not holders.get(blocks[depth], 0) & bit:
                return depth
        return len(blocks)
