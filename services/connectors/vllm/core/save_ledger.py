"""Which blocks are being saved, and which ones the pool is believed to hold.

Invariant (`check`): a block is ordered for saving at most once at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

SAVED_KEYS_MAX: Final = 1 << 18


class SaveOrder(NamedTuple):
    """Blocks of one request that are saved together; `blocks` are their positions in its chain."""

    request_id: str
    keys: list[bytes]
    blocks: list[int]


class SaveLedger:
    """The saves of every request. A save is over when all workers have said what was stored."""

    def __init__(self) -> None:
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # with the number of the save that ended
        self._ended = 0
        self._orders: dict[str, SaveOrder] = {}
        self._in_flight: set[bytes] = set()
        self._count = 0

    @property
    def ended(self) -> int:
        """Saves that have ended: as of which an answer of the pool is known."""
        return self._ended

    @property
    def under_way(self) -> int:
        """Orders that did not end yet."""
        return len(self._orders)

    def is_in_flight(self, key: bytes) -> bool:
        """Whether the block of this key is being saved."""
        return key in self._in_flight

    def begin(self, request_id: str, keys: Sequence[bytes], blocks: Sequence[int]) -> str:
        """These blocks are saved now. Returns the order's name."""
        self._count += 1
        name = f"s{self._count}"
        self._orders[name] = SaveOrder(request_id, list(keys), list(blocks))
        self._in_flight.update(keys)
        return name

    def end(self, name: str, stored: Sequence[int]) -> SaveOrder:
        """A save ended; the pool has the blocks at these positions. An order that is not known has no blocks."""
        order = self._orders.pop(name, SaveOrder("", [], []))
        self._in_flight.difference_update(order.keys)
        self._ended += 1
        for position in stored:
            if 0 <= position < len(order.keys):
                self._stored[order.keys[position]] = self._ended
                self._stored.move_to_end(order.keys[position])
        while len(self._stored) > SAVED_KEYS_MAX:
            self._stored.popitem(last=False)
        return order

    def stored_since(self, key: bytes, ended: int | None) -> bool:
        """Whether the block was stored, at any time (None), or after so many saves had ended."""
        number = self._stored.get(key)
        return number is not None and (ended is None or number > ended)

    def forget_stored(self) -> None:
        """New keys from here on: what the pool holds under the old ones is of no use."""
        self._stored.clear()

    def check(self) -> None:
        """The invariants; for tests."""
        ordered = [key for order in self._orders.values() for key in order.keys]
        assert len(ordered) == len(set(ordered)), "a block is saved twice at a time"
        assert set(ordered) == self._in_flight, "keys in flight and orders differ"
        assert len(self._stored) <= SAVED_KEYS_MAX
