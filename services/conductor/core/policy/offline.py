"""Offline requests: they take what is idle, and no promise to online requests depends on them.

An offline request has no promise of its own and can come back at any time, so it is taken only where no online
request would notice. `Rules.offline_share` is the part of an instance that it may help to fill; the rest stays free
for online requests, which may come at any moment and are taken whatever offline requests do:

prompt   nothing waits at the chosen instances, neither a prompt nor for a place, and computing it takes at most
         what is left of the TTFT promise beyond the share: an online request that comes right after it waits so long.
         While next to nothing is asked for online, a prompt may be longer.
answer   with it a step takes at most the share of the TBT promise, and the places and the memory for KV of the decode
         instance are filled to the share at most. An instance that generates nothing takes one in any case.

The prompt of another offline request counts like any other, so each instance computes one of them at a time. Short ones
may wait behind it, or an instance would be idle from the end of each until that is known here and the next has come:
one, while both take 100 ms at most and no more than a single one may, and more, while all take 25 ms at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from mooncache.conductor.core.policy.common import Policy
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, AdmissionMode, Bools, Choice, Reason, Request, Rules

if TYPE_CHECKING:
    import random

PLACES_UNKNOWN: Final = 64  # of an engine that does not say how many sequences it decodes together
AHEAD_S: Final = (
    0.025  # of prompts that may be in front of an online one: or engines are idle between short ones
)
NEXT_S: Final = 0.1  # of one in front and one behind it: predictions hold the way to the engine, too
RETRY_MIN_S: Final = 0.005
RETRY_MAX_S: Final = 1.0
_WAITS_S: Final = 1e-3  # less than this is rounding
_LOOKS: Final = 4  # while something waits: it may be over sooner than predicted
_QUIET_S: Final = 0.05  # of computing that was asked for lately


def choose(policy: Policy, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
    """The policy's choice; for an offline request only where there is room, else its refusal with `Reason.OFFLINE`.

    Where the cheapest pair is busy, the cheapest one of idle instances is tried.
    """
    if not request.offline:
        return policy.choose(request, fleet, rules, rng)
    unjudged = replace(rules, admission=AdmissionMode.NONE)
    choice = judged(request, fleet, rules, policy.choose(request, fleet, unjudged, rng))
    if choice.reason is not Reason.OFFLINE:
        return choice
    idle = fleet.ready & (fleet.queue_s <= _WAITS_S) & ~_taken(request, fleet, rules)
    if not (idle & fleet.summary.decoders).any():
        return choice
    some = replace(fleet, ready=idle)
    other = judged(request, some, rules, policy.choose(request, some, unjudged, rng))
    # Without an idle prefill instance the policy would let a decode instance compute any prompt.
    apart = choice.prefill == NO_ROW or other.prefill != NO_ROW
    return other if other.admitted and apart else choice


def judged(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> Choice:
    """The choice, refused unless it leaves the promises to online requests whole."""
    if not choice.admitted:
        return choice
    if rules.offline_share <= 0:
        return _refused(choice, RETRY_MAX_S)
    alone_s = (1.0 - rules.offline_share) * request.ttft_slo_s
    if choice.waiting_s > _WAITS_S and choice.waiting_s + choice.compute_s > _ahead_s(fleet, choice, alone_s):
        return _refused(choice, choice.waiting_s / _LOOKS)
    online_s = max((asked_s[-1] for asked_s in request.demand), default=0.0)
    if online_s > _QUIET_S and choice.compute_s > alone_s:
        return _refused(choice, RETRY_MAX_S)
    row = choice.decode
    there = float(fleet.sequences[row])
    if there > 0 and _fills(request, fleet, rules, choice):
        return _refused(choice, float(fleet.stay_s[row]) / there)
    return choice


def _ahead_s(fleet: Fleet, choice: Choice, alone_s: float) -> float:
    """How much computing of prompts an online request may find in front of it, this one's included."""
    is_next = float(fleet.queue_prompts[choice.prefiller_row]) <= 1
    return max(AHEAD_S, min(NEXT_S, alone_s)) if is_next else AHEAD_S


def _taken(request: Request, fleet: Fleet, rules: Rules) -> Bools:
    """The rows whose places are filled to the share."""
    places = np.where(fleet.sequences_max > 0, fleet.sequences_max, PLACES_UNKNOWN)
    taken: Bools = (fleet.sequences > 0) & (
        fleet.sequences + request.sequences > rules.offline_share * places
    )
    return taken


def _fills(request: Request, fleet: Fleet, rules: Rules, choice: Choice) -> bool:
    """Whether the decode instance would be fuller than offline requests may make it."""
    row, share = choice.decode, rules.offline_share
    capacity = float(fleet.kv_capacity_tokens[row])
    return (
        choice.tbt_s > share * request.tbt_slo_s
        or bool(_taken(request, fleet, rules)[row])
        or (capacity > 0 and float(fleet.kv_tokens[row]) + request.kv_tokens > share * capacity)
    )


def _refused(choice: Choice, retry_s: float) -> Choice:
    retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, retry_s))
    return replace(choice, admitted=False, reason=Reason.OFFLINE, retry_after_s=retry_s)
