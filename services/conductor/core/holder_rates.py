"""How fast each store node was read from lately, its memory and its disks apart.

Idea: the rate of a source is the mean of its nodes, and one slow node makes all look slow, or hides among fast
ones. So a load of which nearly all blocks came from one node teaches that node's rate as well. It counts once it was
seen a few times; until then, and again when nothing was read there for a while, the rate of the source counts: a node
that was slow once is tried again. A bounded number of nodes is remembered; those read from longest ago go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mooncache.client.results import BELOW_MEMORY
from mooncache.conductor.core.learning import ONE_SOURCE_SHARE, TransferLearner
from mooncache.kvcache.leg_hint import LoadedFrom

HOLDERS_MAX: Final = 1024
TRUSTED: Final = 3
"""Loads after which a node's own rate counts."""
FORGOTTEN_AFTER_S: Final = 600.0


class BlockHolder(NamedTuple):
    """A store node's memory, or its disks."""

    store_node: str
    is_on_ssd: bool


class HolderRates:
    """Bytes per second from each holder into engines of other hosts."""

    def __init__(self) -> None:
        self._seen: dict[
            BlockHolder, tuple[TransferLearner, float]
        ] = {}  # with the last time; the oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, holder: BlockHolder, loaded_bytes: float, seconds: float, now_s: float) -> None:
        """Take in one load that came from there."""
        learner, last_s = self._seen.pop(holder, (None, now_s))
        if learner is None or now_s - last_s > FORGOTTEN_AFTER_S:
            learner = TransferLearner()
        learner.observe(loaded_bytes, seconds)
        self._seen[holder] = learner, now_s
        if len(self._seen) > HOLDERS_MAX:
            del self._seen[next(iter(self._seen))]

    def bytes_per_s(self, holder: BlockHolder, now_s: float) -> float | None:
        """The holder's own rate; None: too little was seen of it lately."""
        learner, last_s = self._seen.get(holder, (None, 0.0))
        if learner is None or now_s - last_s > FORGOTTEN_AFTER_S or learner.bytes_per_s.count < TRUSTED:
            return None
        return learner.bytes_per_s.value

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._seen) <= HOLDERS_MAX, "more holders than may be"
        times = [last_s for _, last_s in self._seen.values()]
        assert times == sorted(times), "holders are not in the order in which they were seen"


def holder_of(places: Sequence[LoadedFrom]) -> BlockHolder | None:
    """The holder of nearly all blocks of a load; None: there is none."""
    blocks: dict[BlockHolder, int] = {}
    for place in places:
        holder = BlockHolder(place.store_node, place.tier in BELOW_MEMORY)
        blocks[holder] = blocks.get(holder, 0) + place.blocks
    if not blocks:
        return None
    most = max(blocks, key=lambda each: blocks[each])
    return most if blocks[most] >= ONE_SOURCE_SHARE * sum(blocks.values()) else None
