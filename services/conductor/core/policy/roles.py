"""Roles: how many instances should compute prompts and how many should generate, as the load moves.

Mooncake (FAST'25, section 4.4) keeps the ratio fixed, watches both pools and switches roles on lasting changes; no
algorithm is published. Here both sides are measured in instances: prompts need as many as the seconds of computing
that arrive each second (at a target use, and to work off what is queued), generating needs as many as keep the batch
within a share of the promised time between tokens, the KV within a share of the memory, and the sequences within a
share of the places of the batches. The side that lacks takes from the side that has more than it needs. When both
lack, requests are refused or late whatever is done, and what counts is the slower side: then the split is taken at
which both sides, used to the full, carry most of what arrives.
Against going to and fro: needs are smoothed, they have to last for some plans, a switch the other way has to wait, and
the giver keeps a reserve. How long all that takes follows from what a switch costs: an instance that works again
within seconds may follow a load that one with a restart of 20 seconds has to ignore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mooncache.conductor.core.policy.fleet import DECODE, PREFILL, Fleet
from mooncache.conductor.core.policy.types import Bools, Ints

# In times of what a switch takes.
FOLLOWS_IN = 3.0  # time constant of the smoothing
TURN_BACK = 6.0
BLIND = 3.0  # at first caches fill, and answers that ended were short ones
BACKLOG_WITHIN = 3.0  # in which queued prompts should be worked off
PLANS_EVERY = 0.75
SWITCH_S = 20.0  # from drained to ready in the new role, where an engine has to start for it
SWITCH_LEAST_S = 1.0
PROMPT_USE = 0.75  # of a prefill instance's time that is planned for
TOKEN_TIME = 0.45  # share of the promised time between tokens that is planned for
MEMORY_USE = 0.85
PLACES_USE = 0.85
RESERVE = 0.25  # instances of its need that a giver keeps on top
LASTS_PLANS = 2
URGENT = 1.3  # times what there is: not waited for
NO_SIDE = -1
AT_ONCE_MAX = 0.5  # share of the givers that may leave in one plan
FULL_TOKEN_TIME = 0.8  # share of the promised time between tokens that is planned for when both sides lack
WORTH = 1.03  # times what is carried now: what a switch has to gain then


class Switch(NamedTuple):
    """An instance that should change its role."""

    row: int
    role: int


@dataclass(slots=True)
class Needs:
    """How many instances each side needs, in instances with fractions; least: when they are used to the full."""

    prefill: float
    decode: float
    prefill_least: float = 0.0
    decode_least: float = 0.0


class RolePlanner:
    """Plans switches; call `plan` at even intervals. Keeps only what smoothing and hysteresis need."""

    def __init__(self, switch_s: float = SWITCH_S) -> None:
        """switch_s: how long an instance that changes its role is missing on both sides."""
        switch_s = max(SWITCH_LEAST_S, switch_s)
        self._follows_in_s, self._blind_s = FOLLOWS_IN * switch_s, BLIND * switch_s
        self._turn_back_s, self._backlog_within_s = TURN_BACK * switch_s, BACKLOG_WITHIN * switch_s
        self._before: tuple[float, float, float] | None = (
            None  # now_s, what had arrived of computing and generating
        )
        self._rate = 0.0
        self._generating_rate = 0.0
        self._passed_s = 0.0
        self._wanted = (NO_SIDE, 0)
        self._last = (NO_SIDE, -math.inf)
        self.needs = Needs(0.0, 0.0)

    def plan(self, fleet: Fleet, arrived_s: float, tbt_slo_s: float, now_s: float) -> tuple[Switch, ...]:
        """The switches that should be made now, none most of the time.

        arrived_s: seconds of computing that prefill instances were given so far (`FleetBook.arrived_s`).
        """
        self._measure(arrived_s, fleet.generating_s, now_s)
        givers = {role: fleet.ready & (fleet.role == role) for role in (PREFILL, DECODE)}
        counts = {role: int(np.count_nonzero(mask)) for role, mask in givers.items()}
        if min(counts.values()) == 0:
            return ()
        self.needs = self._needs(fleet, tbt_slo_s)
        side, number = split(self.needs, counts)
        known, times = self._wanted
        self._wanted = (side, times + 1 if side == known else 1)
        urgent = self.needs.prefill > URGENT * counts[PREFILL] or self.needs.decode > URGENT * counts[DECODE]
        if side == NO_SIDE or (self._wanted[1] < LASTS_PLANS and not urgent):
            return ()
        giver = DECODE if side == PREFILL else PREFILL
        last_side, last_s = self._last
        if side != last_side and now_s - last_s < self._waits_s(side, giver, counts):
            return ()
        number = min(number, max(1, int(AT_ONCE_MAX * counts[giver])))
        self._last = (side, now_s)
        load = fleet.queue_s if giver == PREFILL else fleet.sequences
        rows: Ints = np.flatnonzero(givers[giver])
        order = rows[np.argsort(load[rows], kind="stable")]
        return tuple(Switch(int(row), side) for row in order[:number])

    def _waits_s(self, side: int, giver: int, counts: dict[int, int]) -> float:
        """The time from a switch to one the other way.

        A lack that is not due to chance, beside a surplus, waits only until most of what is known was measured since.
        """
        needs = {PREFILL: self.needs.prefill, DECODE: self.needs.decode}
        lacks = needs[side] > URGENT * counts[side]
        return self._follows_in_s if lacks and _spare(needs[giver], counts[giver]) > 0 else self._turn_back_s

    def _measure(self, arrived_s: float, generating_s: float, now_s: float) -> None:
        if self._before is not None and now_s > self._before[0]:
            passed_s = now_s - self._before[0]
            rate = max(0.0, arrived_s - self._before[1]) / passed_s
            self._passed_s += passed_s
            # The first time counts evenly, so that a conductor that just began is not blind.
            weight = max(1.0 - math.exp(-passed_s / self._follows_in_s), min(1.0, passed_s / self._passed_s))
            self._rate += (rate - self._rate) * weight
            rate = max(0.0, generating_s - self._before[2]) / passed_s
            self._generating_rate += (rate - self._generating_rate) * weight
        self._before = (now_s, arrived_s, generating_s)

    def _needs(self, fleet: Fleet, tbt_slo_s: float) -> Needs:
        computing = fleet.ready & (fleet.role == PREFILL)
        prefill = prefill_need(fleet, computing, self._rate, self._backlog_within_s)
        generating = fleet.ready & (fleet.role == DECODE)
        decode = decode_need(fleet, computing, generating, self._generating_rate, tbt_slo_s)
        if self._passed_s < self._blind_s:
            return Needs(prefill, decode)
        base_s = float(np.mean(fleet.decode_base_s[generating]))
        full_s = max(FULL_TOKEN_TIME * tbt_slo_s, base_s + 1e-3)
        batch_s = float(np.sum(fleet.batch_sequences[generating] * fleet.decode_per_sequence_s[generating]))
        batch_s += float(np.sum(fleet.batch_kv_tokens[generating] * fleet.decode_per_token_s[generating]))
        least = max(batch_s, self._generating_rate * full_s) / (full_s - base_s)
        return Needs(prefill, decode, self._rate, max(least, _full_batches(fleet, computing, generating)))


def prefill_need(fleet: Fleet, computing: Bools, rate: float, within_s: float) -> float:
    """Instances that prompts need.

    Args:
        computing: the rows whose queues count. rate: seconds of computing that come in each second.
        within_s: in which the queues should be worked off.
    """
    return rate / PROMPT_USE + float(np.sum(fleet.queue_s[computing])) / within_s


def decode_need(
    fleet: Fleet, computing: Bools, generating: Bools, generating_rate: float, tbt_slo_s: float
) -> float:
    """Instances that answers need, by time, memory and places.

    Args:
        computing: the rows with queued prompts, which take no place yet. generating: the rows that generate; not empty.
        generating_rate: seconds that new answers add to steps in each second.
    """
    sequences = float(np.sum(fleet.sequences[generating]))
    kv_tokens = float(np.sum(fleet.kv_tokens[generating]))
    base_s = float(np.mean(fleet.decode_base_s[generating]))
    work_s = sequences * float(np.mean(fleet.decode_per_sequence_s[generating]))
    work_s += kv_tokens * float(np.mean(fleet.decode_per_token_s[generating]))
    step_s = max(TOKEN_TIME * tbt_slo_s, base_s + 1e-3)
    # What is there, and what will be when as much keeps coming: steps are 1 / step_s a second, and each has
    # step_s - base_s for sequences.
    decode = max(work_s, generating_rate * step_s) / (step_s - base_s)
    capacity = float(np.mean(fleet.kv_capacity_tokens[generating]))
    if capacity > 0:
        decode = max(decode, kv_tokens / (MEMORY_USE * capacity))
    return max(decode, _full_batches(fleet, computing, generating) / PLACES_USE)


def _full_batches(fleet: Fleet, computing: Bools, generating: Bools) -> float:
    """How many batches the sequences fill that generate or wait for a place only; 0 where places have no limit.

    A sequence whose prompt queues at a prefill instance takes no place yet.
    """
    places = float(np.mean(fleet.sequences_max[generating]))
    if places <= 0:
        return 0.0
    queued = float(np.sum(fleet.queue_prompts[computing]))
    return max(0.0, float(np.sum(fleet.sequences[generating])) - queued) / places


def split(needs: Needs, counts: dict[int, int]) -> tuple[int, int]:
    """The side that should get instances, and how many: a lacking side takes the other's surplus."""
    spare_decode = _spare(needs.decode, counts[DECODE])
    spare_prefill = _spare(needs.prefill, counts[PREFILL])
    short_prefill = math.ceil(needs.prefill) - counts[PREFILL]
    short_decode = math.ceil(needs.decode) - counts[DECODE]
    if short_decode > 0 and spare_prefill > 0:
        return DECODE, min(short_decode, spare_prefill)
    if short_prefill > 0 and spare_decode > 0:
        return PREFILL, min(short_prefill, spare_decode)
    if short_decode > 0 or short_prefill > 0:
        return _balanced(needs, counts)
    return NO_SIDE, 0


def _spare(need: float, count: int) -> int:
    """The instances that a side could give."""
    return count - max(1, math.ceil(need * (1 + RESERVE)))


def _balanced(needs: Needs, counts: dict[int, int]) -> tuple[int, int]:
    """The side that should have one more when neither side has a surplus."""
    if min(needs.prefill_least, needs.decode_least) <= 0:
        return NO_SIDE, 0  # not known yet

    def carried(prefill: int, decode: int) -> float:
        return min(prefill / needs.prefill_least, decode / needs.decode_least)

    prefill, decode = counts[PREFILL], counts[DECODE]
    more = {
        DECODE: carried(prefill - 1, decode + 1) if prefill > 1 else 0.0,
        PREFILL: carried(prefill + 1, decode - 1) if decode > 1 else 0.0,
    }
    side = max(more, key=lambda role: more[role])
    return (side, 1) if more[side] > WORTH * carried(prefill, decode) else (NO_SIDE, 0)
