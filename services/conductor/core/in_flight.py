"""Blocks that are being computed now: which running request will have which prefix, and when.

A chain key stands for its whole prefix, so the longest common prefix with running requests is found by their
keys at a few checkpoints (block 1, 2, 4, 8, ... and the last): the deepest own checkpoint that another request
shares names the candidates, a binary search in each of them finds the length, one comparison of the bytes
proves it. No loop over keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from mooncache.client.keys import KEY_BYTES

LOOKED_AT_MAX = 8  # running requests that are looked at
WAITS_MAX = 3


@dataclass(frozen=True, slots=True)
class Running:
    """A request whose prompt is being computed on an instance until about `end_s`."""

    decision_id: str
    instance_id: str
    keys: bytes
    end_s: float
    pool: bool = True
    begin: int = 0  # blocks before this one are there already, or another request makes them
    store_node: str = ""  # where its blocks come first, "" when placement decides
    pool_tenant: str = ""  # whose blocks they are at the nodes

    @property
    def blocks(self) -> int:
        """The blocks of its prompt."""
        return len(self.keys) // KEY_BYTES


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many leading blocks a running request shares."""

    running: Running
    blocks: int


@lru_cache(maxsize=1024)
def checkpoints(count: int) -> tuple[int, ...]:
    """Block positions at which a chain of `count` keys is indexed, ascending: 0, 1, 3, 7, ... and the
    last."""
    found = []
    at = 1
    while at < count:
        found.append(at - 1)
        at *= 2
    if count:
        found.append(count - 1)
    return tuple(found)


def chained_blocks(
    mine: bytes, theirs: bytes, least: int = 0, most: int | None = None, guess: int = -1
) -> int:
    """How many leading keys two packed chains share, taking for granted that equal keys have equal prefixes.

    least, most: what is known already. guess: what is looked at first; when it is right, two keys are compared.
    """
    low, high = least, min(len(mine), len(theirs)) // KEY_BYTES
    if most is not None:
        high = min(high, most)
    while low < high:
        middle = guess if low < guess <= high else guess + 1 if low == guess else (low + high + 1) // 2
        end = middle * KEY_BYTES
        if mine[end - KEY_BYTES : end] == theirs[end - KEY_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


class InFlight:
    """The prefixes that running requests are computing."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._at: dict[bytes, dict[str, Running]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, running: Running) -> None:
        """Note that the request begins; chains without keys are not noted."""
        if not running.keys or running.decision_id in self._running:
            return
        self._running[running.decision_id] = running
        for key in _keys_at(running.keys):
            self._at.setdefault(key, {})[running.decision_id] = running

    def get(self, decision_id: str) -> Running | None:
        """A request whose prompt is being computed."""
        return self._running.get(decision_id)

    def end(self, decision_id: str) -> Running | None:
        """Forget a request (done, failed or given up); return it, None when it was not known."""
        running = self._running.pop(decision_id, None)
        if running is None:
            return None
        for key in _keys_at(running.keys):
            there = self._at.get(key)
            if there is not None:
                there.pop(decision_id, None)
                if not there:
                    del self._at[key]
        return running

    def unmade(self, keys: bytes, begin: int, end: int, store_node: str) -> list[tuple[int, int]]:
        """The ranges of blocks begin..end of a chain that no running request brings to the node."""
        left = [(begin, end)] if begin < end else []
        for overlap in self.overlaps(keys):
            running = overlap.running
            if running.store_node == store_node:
                left = [part for each in left for part in _without(each, running.begin, overlap.blocks)]
        return left

    def overlaps(self, keys: bytes) -> list[Overlap]:
        """Running requests that share leading blocks, longest first, a few at most.

        Of requests that share equally much the one that ends first counts.
        """
        if not self._running or not keys:
            return []
        best: dict[tuple[int, str], Overlap] = {}
        seen: set[str] = set()
        count, blocks = len(keys) // KEY_BYTES, 0
        deeper = None  # blocks up to a checkpoint that all long enough chains have too: who is not there ends before
        for at in reversed(checkpoints(count)):
            most, deeper = deeper, at if (at + 1) & at == 0 else None
            there = self._at.get(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if there is None:
                continue
            for running in islice(reversed(there.values()), LOOKED_AT_MAX):
                if running.decision_id in seen:
                    continue
                if len(seen) >= LOOKED_AT_MAX:
                    break
                seen.add(running.decision_id)
                blocks = chained_blocks(keys, running.keys, at + 1, most, blocks)
                place = (blocks, running.instance_id)
                known = best.get(place)
                if blocks and (known is None or running.end_s < known.running.end_s):
                    best[place] = Overlap(running, blocks)
            if len(seen) >= LOOKED_AT_MAX:
                break
        ordered = sorted(best.values(), key=lambda o: (-o.blocks, o.running.end_s))[:WAITS_MAX]
        return [o for o in ordered if o.running.keys.startswith(keys[: o.blocks * KEY_BYTES])]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        noted = {decision_id for there in self._at.values() for decision_id in there}
        assert noted == set(self._running), "checkpoints and running requests disagree"
        assert all(self._at.values()), "an empty checkpoint was kept"


def _without(part: tuple[int, int], begin: int, end: int) -> Iterable[tuple[int, int]]:
    """What is left of a range without another one."""
    if begin >= end:
        return [part]
    first, last = part
    return [(a, b) for a, b in ((first, min(last, begin)), (max(first, end), last)) if a < b]


def _keys_at(keys: bytes) -> Iterable[bytes]:
    return {keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in checkpoints(len(keys) // KEY_BYTES)}
