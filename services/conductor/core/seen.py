"""Which blocks were computed before: tells "evicted" from "never seen", and whose they were.

Two generations of the native index: new blocks go into the younger one, and when it is full the older is
dropped whole. A block is remembered under its key, and under its content (tokens alone) for the passport that
it was computed with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.cache_index import block_records
from mooncache.kvcache.block_index import BlockIndex
from mooncache.kvcache.leg_hint import CacheOutcome

RANGES_MAX = 64
_PASSPORTS_MAX = 64
_OWN = (1 << 64) - 1  # tenant number of plain keys in the index; contents are under their passport's group
_HOLDER = 0


class MissReason(StrEnum):
    """Why prompt tokens had to be computed."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    OTHER_PASSPORT = "other_passport"
    OTHER_TENANT = "other_tenant"
    NOT_FETCHED = "not_worth_fetching"
    POOL_UNREACHABLE = "pool_unreachable"
    NO_BLOCK = "no_complete_block"
    LOAD_FAILED = "load_failed"
    TIMED_OUT = "timed_out"
    COMPUTED_FASTER = "computed_faster"
    LOAD_CUT = "load_cut"
    CACHE_OFF = "cache_off"


_OF_OUTCOMES = {
    CacheOutcome.TIMEOUT: MissReason.TIMED_OUT,
    CacheOutcome.FAILED: MissReason.LOAD_FAILED,
    CacheOutcome.POOL_ABSENT: MissReason.POOL_UNREACHABLE,
    CacheOutcome.COMPUTED_FASTER: MissReason.COMPUTED_FASTER,
    CacheOutcome.LOAD_CUT: MissReason.LOAD_CUT,
    CacheOutcome.OFF: MissReason.CACHE_OFF,
}


def miss_reason(outcome: CacheOutcome) -> MissReason:
    """Why blocks that were expected were not used, by what the engine said of its cache."""
    return _OF_OUTCOMES.get(outcome, MissReason.EVICTED)


_OF_FLAGS = (MissReason.EVICTED, MissReason.OTHER_TENANT, MissReason.OTHER_PASSPORT)


class MissRange(NamedTuple):
    """Prompt tokens from begin to end (exclusive) that had to be computed, and why."""

    begin: int
    end: int
    reason: MissReason


class SeenBlocks:
    """The keys of blocks that were computed before. `blocks_max` blocks are remembered at most; 0 remembers none."""

    def __init__(self, make_index: Callable[[], BlockIndex], blocks_max: int) -> None:
        self._make_index = make_index
        self._half = blocks_max // 2
        self._young, self._old = make_index(), make_index()
        self._groups: dict[int, None] = {}

    def learn(self, keys: bytes, content_keys: bytes, group: int) -> None:
        """Remember the blocks of a prompt that was computed under a passport group."""
        room = self._half * KEY_BYTES
        if not keys or not room:
            return
        keys, content_keys = keys[:room], content_keys[:room]
        if self._young.stats()["blocks"] + (len(keys) + len(content_keys)) // KEY_BYTES > 2 * self._half:
            self._old, self._young = self._young, self._make_index()
        self._young.apply(_HOLDER, block_records(keys, tenant_id=_OWN))
        if content_keys:
            self._groups.pop(group, None)
            self._groups[group] = None
            if len(self._groups) > _PASSPORTS_MAX:
                del self._groups[next(iter(self._groups))]
            self._young.apply(_HOLDER, block_records(content_keys, tenant_id=group))

    def explain(
        self, keys: bytes, content_keys: bytes, group: int, begin_block: int, block_tokens: int
    ) -> list[MissRange]:
        """The reasons of the misses from `begin_block` on, as ranges of tokens."""
        part, content = keys[begin_block * KEY_BYTES :], content_keys[begin_block * KEY_BYTES :]
        count = len(part) // KEY_BYTES
        if not count:
            return []
        own = self._present(_OWN, part)
        tenant = passport = 0
        if len(content) == len(part):
            tenant = self._present(group, content) & ~own
            for other in self._groups:
                passport |= self._present(other, content)
            passport &= ~(own | tenant)
        texts = [f"{bits:0{count}b}" for bits in (own, tenant, passport)]  # last block first
        at, found = begin_block + count, []
        for flags, same in itertools.groupby(zip(*texts, strict=True)):
            length = sum(1 for _ in same)
            reason = MissReason.NEVER_SEEN
            for flag, name in zip(flags, _OF_FLAGS, strict=True):
                reason = name if flag == "1" else reason
            found.append(MissRange((at - length) * block_tokens, at * block_tokens, reason))
            at -= length
        return found[: -RANGES_MAX - 1 : -1]

    def blocks(self) -> int:
        """The number of remembered keys, contents included."""
        return self._young.stats()["blocks"] + self._old.stats()["blocks"]

    def _present(self, tenant: int, keys: bytes) -> int:
        """A number whose bit i is set when block i is remembered."""
        bits = int.from_bytes(self._young.present(tenant, keys), "little")
        return bits | int.from_bytes(self._old.present(tenant, keys), "little")
