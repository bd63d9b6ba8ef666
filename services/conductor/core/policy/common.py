"""What all policies share: who may be chosen, the least of a column, and promises.

A cost that is not a number never wins: `least` treats it as infinite, and how many there were is said in the
choice, so that a broken cost model shows up instead of attracting all requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mooncache.conductor.core.policy.fleet import Even, Fleet, FleetSummary
from mooncache.conductor.core.policy.types import NO_ROW, Bools, Choice, Floats, Ints, Reason, Request, Rules

if TYPE_CHECKING:
    import random

# What is not a number is dealt with by `cleaned`, not by a warning.
QUIET = np.errstate(divide="ignore", invalid="ignore", over="ignore")
NO_INSTANCE = Choice(False, Reason.NO_INSTANCE, retry_after_s=1.0)


class Policy(Protocol):
    """Decides one request. A policy keeps nothing between calls: what it knows is in its arguments."""

    name: str

    def choose(self, request: Request, fleet: Fleet, rules: Rules, rng: random.Random) -> Choice:
        """The choice; `rng` breaks ties (and is the whole of the policy `random`)."""
        ...


def usable(request: Request, fleet: Fleet) -> Bools:
    """The rows that take requests and are not excluded."""
    if not request.exclude:
        return fleet.ready
    mask: Bools = fleet.ready.copy()
    for row in request.exclude:
        if 0 <= row < len(mask):
            mask[row] = False
    return mask


def candidates(request: Request, fleet: Fleet) -> tuple[Bools, Bools]:
    """The masks of the rows that may prefill for others, and of those that may decode.

    Better a wrong role than no answer: any engine can do both, so without decode instances all generate.
    """
    summary = fleet.summary
    prefillers, decoders = summary.prefillers, summary.decoders
    can_generate = summary.can_generate
    if request.exclude:
        mask = usable(request, fleet)
        prefillers, decoders = prefillers & mask, decoders & mask
        can_generate = bool(decoders.any())
    if not can_generate:
        return np.zeros(len(fleet), dtype=np.bool_), _kept(request, usable(request, fleet))
    if request.no_prefill:
        prefillers = np.zeros(len(fleet), dtype=np.bool_)
    return prefillers, _kept(request, decoders)


def _kept(request: Request, decoders: Bools) -> Bools:
    """The instance that has the decode leg already is the only candidate for it, while it is one."""
    row = request.keep_decode
    if row == NO_ROW or not decoders[row]:
        return decoders
    only: Bools = np.zeros(len(decoders), dtype=np.bool_)
    only[row] = True
    return only


def cleaned(scores: Floats, mask: Bools, summary: FleetSummary | None = None) -> tuple[Floats, int]:
    """The scores, infinite outside the mask and where they are not finite numbers, and the count of the latter.

    summary: of the fleet that the mask is of; adding its column costs a fraction of looking at the mask.
    """
    away = summary.outside(mask) if summary is not None else None
    if away is not None and len(scores):
        found: Floats = scores + away
        # argmin() returns the first NaN if there is one, so the smallest cost tells whether any is NaN.
        if not math.isnan(found[found.argmin()]):
            return found, 0
    found = np.where(mask, scores, np.inf)
    if not len(found) or not math.isnan(found[found.argmin()]):
        return found, 0
    invalid = np.isnan(found)
    found[invalid] = np.inf
    return found, int(np.count_nonzero(invalid))


def most(column: Floats | Ints) -> float:
    """The largest of a column, 0 of an empty one; this way is twice as fast as `max`."""
    return float(column[column.argmax()]) if len(column) else 0.0


def least(scores: Floats, rng: random.Random) -> int:
    """The row of the least score, one of the equals at random, NO_ROW when all are infinite."""
    if not len(scores):
        return NO_ROW
    first = int(scores.argmin())
    low = float(scores[first])
    if not low < np.inf:
        return NO_ROW
    equal = (scores <= low + abs(low) * 1e-9 + 1e-12).nonzero()[0]
    return first if len(equal) == 1 else int(equal[rng.randrange(len(equal))])


def held(request: Request) -> Ints:
    """The leading tokens that each row will hold when a newcomer is begun there.

    Algorithm 1 counts a prompt's blocks as cached where it was sent, from the decision on: what is computed on the
    row itself comes before the newcomer.
    """
    if not any(awaited.row != NO_ROW for awaited in request.awaited):
        return request.local
    local: Ints = request.local.copy()
    for awaited in request.awaited:
        if 0 <= awaited.row < len(local):
            local[awaited.row] = max(int(local[awaited.row]), awaited.tokens)
    return local


def handovers_s(request: Request, fleet: Fleet) -> Floats:
    """The time from the end of a prefill elsewhere to the first decode step, for each row.

    What the decode instance does not hold is loaded; the tail behind the last complete block is computed where
    KV travels in blocks.
    """
    summary = fleet.summary
    seconds = summary.nothing
    if summary.hands_over:
        missing = np.maximum(request.cacheable_tokens - request.local, 0)
        seconds = np.where(missing > 0, fleet.handover_s + missing / fleet.handover_tokens_per_s, 0.0)
    if summary.tails:
        n, cacheable = request.prompt_tokens, request.cacheable_tokens
        if most(request.local) <= cacheable:
            tail_s: Even = fleet.prefill_same_s(n, cacheable)
        else:
            tail_s = fleet.prefill_s(n, np.maximum(request.local, cacheable))
        seconds = seconds + np.where(fleet.tail, tail_s, 0.0)
    return seconds


def headroom(priority: int, rules: Rules) -> float:
    """The factor on the limits: more important requests are still taken when others are refused already."""
    return min(2.0, max(0.5, 1.0 + rules.priority_step * priority))


def clamp_retry(seconds: float, rules: Rules) -> float:
    """The Retry-After of a refused client, within sensible bounds."""
    return min(rules.retry_after_max_s, max(rules.retry_after_min_s, seconds))
