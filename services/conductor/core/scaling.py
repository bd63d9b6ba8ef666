"""How many instances a model needs now, for who adds and removes them.

The need is in instances with fractions, of the load that is there and that is asked for, refused requests included:
what prompts and answers take of an instance's time, memory and places at the use that is planned for.
It is what the planner of roles (`policy/roles.py`) works with; here it also holds for instances that do both, and for
sides that have no instance. The largest need within a time counts, so that a lull removes nothing that the next minute
needs; and while too little has been seen, nothing that is there is too much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.fleet import BOTH, DECODE, PREFILL, ROLES, Fleet
from mooncache.conductor.core.policy.roles import PROMPT_USE, decode_need, prefill_need
from mooncache.conductor.core.policy.types import Bools
from mooncache.kvcache.instance_role import InstanceRole

BACKLOG_WITHIN_S = 30.0  # in which queued prompts should be worked off
FOLLOWS_IN_S = 30.0  # time constant of the smoothing
IDLE_BELOW = 1e-2
_ONE_AT_LEAST = 1e-3  # of load


class WorkTotals(NamedTuple):
    """Seconds of work since the beginning, or in each second."""

    asked_s: float = 0.0  # computing prompts, refused requests included
    arrived_s: float = 0.0  # of it, given to prefill instances
    inline_s: float = 0.0  # and to instances that generate
    generating_s: float = 0.0  # what answers add to steps of their batches

    @property
    def refused_s(self) -> float:
        """Computing that was asked for and refused."""
        return max(0.0, self.asked_s - self.arrived_s - self.inline_s)


@dataclass(frozen=True, slots=True)
class InstanceNeeds:
    """Instances that a model needs: of each role, were it the one that serves it."""

    prefill: float = 0.0
    decode: float = 0.0
    both: float = 0.0

    def of(self, role: InstanceRole) -> float:
        """The need of a role."""
        return {InstanceRole.PREFILL: self.prefill, InstanceRole.DECODE: self.decode}.get(role, self.both)


def needs_now(fleet: Fleet, rates: WorkTotals, tbt_slo_s: float) -> InstanceNeeds:
    """What the load of this moment needs.

    Args:
        rates: seconds of work that come in each second.
        tbt_slo_s: promised time between tokens.
    """
    prefill, decode, both = (_rows(fleet, role) for role in (PREFILL, DECODE, BOTH))
    nothing = np.zeros(len(fleet), dtype=bool)
    for_prefill = rates.arrived_s + rates.refused_s
    whole = prefill_need(fleet, both, max(rates.asked_s, for_prefill + rates.inline_s), BACKLOG_WITHIN_S)
    if both.any():
        whole += decode_need(fleet, nothing, both, rates.generating_s, tbt_slo_s)
    if decode.any():
        answers = decode_need(fleet, prefill, decode, rates.generating_s, tbt_slo_s)
        answers += rates.inline_s / PROMPT_USE + float(np.sum(fleet.queue_s[decode])) / BACKLOG_WITHIN_S
    else:  # what answers would take of an instance that is not there cannot be said: one, and then it is seen
        answers = min(1.0, rates.asked_s / _ONE_AT_LEAST)
    return InstanceNeeds(prefill_need(fleet, prefill, for_prefill, BACKLOG_WITHIN_S), answers, whole)


def _rows(fleet: Fleet, role: int) -> Bools:
    """All of a role: also on those that take nothing new, what runs is needed."""
    found: Bools = fleet.role == role
    return found


@dataclass(slots=True)
class _Seen:
    """What is remembered of one model."""

    since_s: float
    at_s: float
    totals: WorkTotals
    rates: WorkTotals = field(default_factory=WorkTotals)
    needs: deque[tuple[float, InstanceNeeds]] = field(default_factory=deque)

    def measure(self, totals: WorkTotals, now_s: float) -> None:
        """Take the totals of this moment in."""
        passed_s = now_s - self.at_s
        if passed_s <= 0:
            return
        weight = 1.0 - exp(-passed_s / FOLLOWS_IN_S)
        self.rates = WorkTotals(
            *(
                rate + (max(0.0, now - before) / passed_s - rate) * weight
                for rate, now, before in zip(self.rates, totals, self.totals, strict=True)
            )
        )
        self.at_s, self.totals = now_s, totals


class NeedsKeeper:
    """The needs of the last `hold_s` seconds of each model; times are of one monotonic clock.

    Call `look` at even intervals of a second or so.
    """

    def __init__(self, tbt_slo_s: float, hold_s: float) -> None:
        self._tbt_slo_s, self._hold_s = tbt_slo_s, hold_s
        self._models: dict[str, _Seen] = {}

    def look(self, model: str, fleet: Fleet, totals: WorkTotals, now_s: float) -> InstanceNeeds:
        """Measure a model's load, and return what it needs at this moment."""
        seen = self._models.get(model)
        if seen is None:
            seen = self._models[model] = _Seen(now_s, now_s, totals)
        seen.measure(totals, now_s)
        found = needs_now(fleet, seen.rates, self._tbt_slo_s)
        seen.needs.append((now_s, found))
        while seen.needs[0][0] < now_s - self._hold_s:
            seen.needs.popleft()
        return found

    def knows(self, model: str) -> bool:
        """Whether a model was looked at."""
        return model in self._models

    def need(self, model: str, role: InstanceRole, fleet: Fleet, now_s: float) -> float:
        """Instances of a role that a model needs: the most within the time that is kept.

        At first, too little has been seen to say that what is ready is too much.
        """
        seen = self._models.get(model)
        most = max((needs.of(role) for _, needs in seen.needs), default=0.0) if seen is not None else 0.0
        if seen is None or now_s - seen.since_s < self._hold_s:
            most = max(most, float(np.count_nonzero(fleet.ready & (fleet.role == ROLES[role]))))
        return most

    def is_active(self, model: str) -> bool:
        """Whether anything was asked of a model within the time that is kept; True while nothing is known."""
        seen = self._models.get(model)
        return seen is None or any(
            max(needs.prefill, needs.decode, needs.both) > IDLE_BELOW for _, needs in seen.needs
        )

    def forget(self, served: AbstractSet[str]) -> None:
        """Forget all other models."""
        for name in [name for name in self._models if name not in served]:
            del self._models[name]
