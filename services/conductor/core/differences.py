"""What an engine did otherwise than the plan said: fetch or compute, and how long to wait.

A plan is priced with what the conductor knows; the engine follows its own measurements where they say otherwise. Both
are compared when the engine reports, so that a difference has a number and a reason instead of going unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from mooncache.conductor.core.seen import MissReason, miss_reason
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegRole

WAIT_SLACK_MS: Final = (
    100.0  # of a wait that ends at its limit: it is noticed, and the pool is asked once more
)


class DifferenceKind(StrEnum):
    """What was done otherwise."""

    COMPUTED = "computed"
    """Tokens that were expected in a cache."""
    LOADED = "loaded"
    """Tokens that were planned to be computed."""
    WAITED = "waited"
    """Longer than the plan allowed."""


class DifferenceReason(StrEnum):
    """Why, where it is not the reason of a miss."""

    IN_POOL = "in_pool"
    """The pool had them when the plan was made; computing was priced lower, but engines load what the pool has."""
    CAME_LATER = "came_later"
    """The pool got them after the plan was made."""
    LATE = "late"
    """The pool answered after the time limit."""


REASONS: Final[dict[DifferenceKind, tuple[MissReason | DifferenceReason, ...]]] = {
    DifferenceKind.COMPUTED: tuple(dict.fromkeys(map(miss_reason, CacheOutcome))),
    DifferenceKind.LOADED: (DifferenceReason.IN_POOL, DifferenceReason.CAME_LATER),
    DifferenceKind.WAITED: (DifferenceReason.LATE,),
}
"""The reasons that each kind may have."""


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """What one leg was expected to find."""

    prefix_tokens: int  # leading tokens that need not be computed
    local_tokens: int  # those of them in the engine's own cache
    pool_tokens: int  # leading tokens that the pool had
    usable_tokens: int  # the most that an engine takes from caches: one token is always computed
    block_tokens: int
    wait_s: float = 0.0  # the time limit for awaited blocks


class Difference(NamedTuple):
    """One thing that was done otherwise. `planned` and `actual` are tokens, of WAITED milliseconds."""

    leg: LegRole
    kind: DifferenceKind
    planned: float
    actual: float
    reason: MissReason | DifferenceReason

    def to_json(self) -> dict[str, object]:
        """As the record of a decision shows it."""
        unit = "ms" if self.kind is DifferenceKind.WAITED else "tokens"
        return {
            "leg": str(self.leg),
            "kind": str(self.kind),
            f"planned_{unit}": self.planned,
            f"actual_{unit}": self.actual,
            "reason": str(self.reason),
        }


def differences(leg: LegRole, planned: PlannedCache, cache: CacheReport) -> list[Difference]:
    """What the engine of one leg did otherwise than planned; less than a block is no difference."""
    found: list[Difference] = []
    expected = min(planned.prefix_tokens, planned.usable_tokens)
    least = max(1, planned.block_tokens)
    if cache.hit_tokens <= expected - least:
        reason = miss_reason(cache.outcome)
        found.append(Difference(leg, DifferenceKind.COMPUTED, expected, cache.hit_tokens, reason))
    fetched = expected - min(planned.local_tokens, expected)
    more = min(cache.loaded_tokens - fetched, cache.hit_tokens - expected)
    if more >= least:
        there = planned.pool_tokens >= expected + more
        why = DifferenceReason.IN_POOL if there else DifferenceReason.CAME_LATER
        found.append(Difference(leg, DifferenceKind.LOADED, fetched, cache.loaded_tokens, why))
    limit_ms = planned.wait_s * 1e3
    if cache.waited_ms > limit_ms + WAIT_SLACK_MS:
        found.append(
            Difference(leg, DifferenceKind.WAITED, round(limit_ms, 3), cache.waited_ms, DifferenceReason.LATE)
        )
    return found
