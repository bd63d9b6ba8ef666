"""What every eviction policy of one tier of one node can do, and what it learns of each use.

Idea: the ids form a prefix tree. A request uses a chain, root first; `use` touches the blocks that are here,
stores the others (or not: admission) and answers which ids left. Within one use the last block counts as used
first and the root last, so a chain goes from its end and no inner block is missing in front of present ones
(as far as the policy can keep that).
Invariants, after every call: at most `capacity_blocks` ids are here; an id that left is not here; the same
calls in the same order give the same answers.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

UNLIMITED: Final = 1 << 62  # a capacity in blocks that nothing fills


class UseInfo(NamedTuple):
    """What a store node can know of the request that uses a chain.

    `first` and `chain_blocks` matter only where a node sees a part.
    """

    first: int = 0  # position of the chain's first listed block in the request's whole chain
    chain_blocks: int = 0  # length of that whole chain (0: the listed blocks are all of it)
    last_partial: bool = False  # the last block holds fewer tokens than a block has
    tenant: int = 0


NO_INFO: Final = UseInfo()


class NodeCache(Protocol):
    """Blocks of one tier of one node."""

    @property
    def capacity_blocks(self) -> int: ...

    def use(self, blocks: Sequence[int], now_s: float, info: UseInfo = NO_INFO) -> list[int]:
        """A request used the chain. Returns the ids that were here before and left by it, in that order."""
        ...

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        """How many of the first blocks can be read now without a gap; changes nothing."""
        ...

    def held(self, blocks: Sequence[int]) -> list[int]:
        """Those of the blocks that are here, in their order; changes nothing."""
        ...

    def discard(self, block: int) -> None:
        """The block is gone for a reason of its own; unknown ids are ignored."""
        ...

    def __contains__(self, block: int, /) -> bool: ...

    def __len__(self) -> int: ...


class CacheTable:
    """What the policies share whose blocks are the keys of one dict, which they keep in their own order."""

    def __init__(self, capacity_blocks: int, here: MutableMapping[int, Any]) -> None:
        self.capacity_blocks = capacity_blocks
        self._here = here

    def leading(self, blocks: Sequence[int], now_s: float) -> int:
        count, here = 0, self._here
        for block in blocks:
            if block not in here:
                break
            count += 1
        return count

    def held(self, blocks: Sequence[int]) -> list[int]:
        here = self._here
        return [block for block in blocks if block in here]

    def discard(self, block: int) -> None:
        self._here.pop(block, None)

    def __contains__(self, block: int, /) -> bool:
        return block in self._here

    def __len__(self) -> int:
        return len(self._here)
