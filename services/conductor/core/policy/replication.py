"""Hot prefixes: which ones are worth another copy by what was asked for lately, and which copies no longer are.

Mooncake (FAST'25, section 4.1, figure 11) has replicas only as a by-product of transfers, which follow demand late.
Here demand is measured: each use of a prefix counts its tokens, fading with a time constant. A prefix is given as many
copies as its readers need to get it at once: the rate of reading in tokens per second over what one holder can send,
times a margin; and never more than half of the instances. A copy goes to the least busy instance that has none. What
has fallen below half of what justified its last copy loses one (a removal is a hint to the cache, which may keep it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.fleet import PREFILL, Fleet
from mooncache.conductor.core.policy.types import Ints

FADES_IN_S = 120.0
MARGIN = 4.0  # readers come in bursts
COPIES_AT_ONCE = 8  # in one plan
SHARE_MAX = 0.5  # of the instances
PREFIXES_MAX = 4096


def faded(uses: float, passed_s: float) -> float:
    """What is left of a count after so many seconds."""
    return uses * math.exp(-max(0.0, passed_s) / FADES_IN_S)


@dataclass(slots=True)
class Prefix:
    """A prefix that is used: its tokens, and how often lately (fading count, as of `at_s`)."""

    tokens: int
    uses: float
    at_s: float

    def uses_at(self, now_s: float) -> float:
        """The fading count at a moment."""
        return faded(self.uses, now_s - self.at_s)


class Copy(NamedTuple):
    """`key` should be copied to `row` (or removed there)."""

    key: int
    row: int
    tokens: int


class PrefixDemand:
    """How often prefixes are used. Keys name a prefix; at most PREFIXES_MAX of them are remembered."""

    def __init__(self) -> None:
        self._known: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._known)

    def use(self, key: int, tokens: int, now_s: float) -> None:
        """A request that begins with the prefix was scheduled."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= PREFIXES_MAX:
                self._forget(now_s)
            self._known[key] = Prefix(tokens, 1.0, now_s)
            return
        found.uses, found.at_s = found.uses_at(now_s) + 1.0, now_s

    def of(self, key: int) -> Prefix | None:
        """The statistics of a prefix; None when there are none."""
        return self._known.get(key)

    def hottest(self, count: int, now_s: float) -> list[tuple[int, Prefix]]:
        """The prefixes of which most tokens are read, most first."""
        order = sorted(
            self._known.items(), key=lambda item: (-item[1].uses_at(now_s) * item[1].tokens, item[0])
        )
        return order[:count]

    def _forget(self, now_s: float) -> None:
        keep = self.hottest(PREFIXES_MAX // 2, now_s)
        self._known = dict(keep)


def copies_kept(wanted: int) -> int:
    """The number of copies to keep; demand has to halve before copies go, which avoids flapping."""
    return max(1, 2 * wanted)


def copies_wanted(prefix: Prefix, send_tokens_per_s: float, instances: int, now_s: float) -> int:
    """The number of holders that the prefix should have; 0 without demand."""
    uses = prefix.uses_at(now_s)
    if uses < 1.0:
        return 0
    rate = uses / FADES_IN_S * prefix.tokens
    wanted = math.ceil(MARGIN * rate / max(1.0, send_tokens_per_s))
    return min(max(1, wanted), max(1, int(SHARE_MAX * instances)))


def plan_replicas(
    demand: PrefixDemand,
    holders: Mapping[int, Sequence[int]],
    fleet: Fleet,
    send_tokens_per_s: float,
    now_s: float,
) -> tuple[list[Copy], list[Copy]]:
    """(copies to make, copies to drop).

    holders: rows that hold each prefix. send_tokens_per_s: what one holder can send to all its readers together.
    """
    usable: Ints = np.flatnonzero(fleet.ready & fleet.pool & (fleet.role == PREFILL))
    order = usable[np.argsort(fleet.queue_s[usable], kind="stable")].tolist()
    makes: list[Copy] = []
    drops: list[Copy] = []
    for key, prefix in demand.hottest(256, now_s):
        there = list(holders.get(key, ()))
        wanted = copies_wanted(prefix, send_tokens_per_s, len(usable), now_s)
        if there and len(there) < wanted and len(makes) < COPIES_AT_ONCE:
            free = [row for row in order if row not in there]
            makes += [Copy(key, row, prefix.tokens) for row in free[: wanted - len(there)]]
        elif len(there) > copies_kept(wanted):
            busiest = sorted(there, key=lambda row: -float(fleet.queue_s[row]))
            drops += [Copy(key, row, prefix.tokens) for row in busiest[: len(there) - copies_kept(wanted)]]
    return makes[:COPIES_AT_ONCE], drops
