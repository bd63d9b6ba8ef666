"""Whom to refuse when more is asked for than instances can compute: the request whose time would serve several others.

Promises count alike, whatever a request costs. With more work than instances, what is refused should therefore be
the most costly: its time keeps the promises of several cheaper ones. What is known is `Request.demand`: the computing
that was asked for lately, by cost, refused requests included, in sums that forget within T seconds. What came in the
last T seconds is expected of the next T seconds, not of longer: a batch that came at once is in the queue already.
Let S be what cheaper requests asked for, in seconds for each instance, which computes T of them. What is more has to
find room in the queue, so a newcomer that waits leaves it:

    limit = promise - (S - T)        where S is more than T; of several T the one that asks for most

The longer the queue, the cheaper has to be who is still taken, up to the promise: the queue stays there, and all of
it is used. Equal requests never give way to each other, and a request that does not wait takes no time from others.
A request that its operator calls important gives way to none.
"""

from __future__ import annotations

import math

import numpy as np

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Choice, Request

FADES_IN_S = (4.0, 16.0)  # chosen on the public conversation trace (docs/benchmarks/admission.md)
BUCKETS = 54  # of cost, see `Request.demand`
_STEPS = 3  # buckets for each doubling
_LEAST_S = 1.0 / 256
_MOST_S = _LEAST_S * 2.0 ** ((BUCKETS - 1) / _STEPS)


def bucket(cost_s: float) -> int:
    """The bucket of a cost."""
    if cost_s > _MOST_S:
        return BUCKETS - 1
    return math.ceil(_STEPS * math.log2(cost_s / _LEAST_S)) if cost_s > _LEAST_S else 0


def cheaper_s(asked_s: tuple[float, ...], cost_s: float) -> float:
    """The computing of all cheaper requests; those of the same bucket count as equally dear."""
    at = bucket(cost_s)
    return asked_s[at - 1] if at else 0.0


def cost_s(choice: Choice) -> float:
    """The seconds of instances that a choice takes for the prompt."""
    return choice.compute_s * max(1, len(choice.members))


def room_for_cheaper_s(request: Request, fleet: Fleet, choice: Choice) -> float:
    """The seconds of its promise that a waiting request leaves to cheaper ones."""
    if request.priority > 0:
        return 0.0
    summary = fleet.summary
    count = int(np.count_nonzero(summary.prefillers))
    if count and choice.prefill == NO_ROW:
        return 0.0  # a decode instance computes it, the others lose nothing
    count = max(1, count or int(np.count_nonzero(summary.decoders)))
    cost = cost_s(choice)
    excess_s = [
        cheaper_s(asked_s, cost) / count - seconds
        for asked_s, seconds in zip(request.demand, FADES_IN_S, strict=False)
    ]
    return max(0.0, *excess_s) if excess_s else 0.0
