"""Eviction policies of one tier of one node, by name.

`make(name, capacity_blocks, **options)` gives a fresh `NodeCache`; NAMES lists what it knows. What needs the
future of a trace lives in belady.py, and measure.py compares policies on a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from mooncache.errors import InvalidArgument
from mooncache.simulate.cache.base import NO_INFO, UNLIMITED, NodeCache, UseInfo
from mooncache.simulate.cache.frequency import LengthAware, Lfu
from mooncache.simulate.cache.queues import S3Fifo, TwoQueues
from mooncache.simulate.cache.recency import Fifo, Lru, Ttl
from mooncache.simulate.cache.reuse import Reuse

__all__ = ["LEARNT", "NAMES", "NO_INFO", "UNLIMITED", "NodeCache", "UseInfo", "make"]

LEARNT: Final = "mooncache"  # what store nodes do when nothing else is set

_MAKERS: Final[dict[str, Callable[..., NodeCache]]] = {
    "lru": Lru,
    "fifo": Fifo,
    "ttl": Ttl,
    "lfu": Lfu,
    "lfu_history": partial(Lfu, history=True),
    "length_aware": LengthAware,
    "2q": TwoQueues,
    "s3fifo": S3Fifo,
    LEARNT: Reuse,
}
NAMES: Final = tuple(_MAKERS)


def make(name: str, capacity_blocks: int, **options: object) -> NodeCache:
    """A fresh cache of `capacity_blocks` blocks (0: nothing is ever stored; UNLIMITED: nothing leaves).

    Raises: InvalidArgument when the name or an option is unknown, or the capacity is negative.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise InvalidArgument(f"eviction policy {name!r} is unknown: choose one of {', '.join(NAMES)}")
    if capacity_blocks < 0:
        raise InvalidArgument(f"capacity_blocks is {capacity_blocks}: it must not be negative")
    try:
        return maker(capacity_blocks, **options)
    except TypeError as error:
        raise InvalidArgument(f"eviction policy {name!r} does not take these options: {error}") from None
