"""What another policy would have done with the same request at the same moment.

The policy is given what was kept of the decision: all instances, when they are few or the decision is young, else
nothing can be said. It breaks ties by the decision's own name, so the answer is always the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncache.conductor.core.candidates import Candidates, Snapshots
from mooncache.conductor.core.decisions import chosen_fields, expected_fields, sentence
from mooncache.conductor.core.policy import find
from mooncache.conductor.core.policy.types import Rules
from mooncache.conductor.core.records import DecisionRecord, unpack

if TYPE_CHECKING:
    import random

GONE = (
    "The state of the instances at that time is no longer kept. Of large fleets only the last decisions keep it, "
    "{count} at the moment. Ask sooner, or replay the trace with `mooncache simulate`."
)
NOTHING = "No instance could be chosen then, whatever the policy."


def other_choice(
    record: DecisionRecord, snapshots: Snapshots, rules: Rules, name: str, rng: random.Random
) -> dict[str, object]:
    """The choice that the policy `name` would have made, as JSON fields. Raises ValueError for an unknown policy.

    Fields: policy, known (whether it can be said), message, and then admitted, reason, chosen, expected, same
    (whether it would have chosen the same instances).
    """
    policy = find(name)
    kept = Candidates.unpacked(record.candidates)
    snapshot = kept.snapshot if kept is not None and kept.whole else snapshots.find(record.decision_id)
    if snapshot is None:
        message = GONE.format(count=len(snapshots)) if kept is not None else NOTHING
        return {"policy": name, "known": False, "message": message}
    fleet, request = snapshot.fleet(), snapshot.policy_request()
    choice = policy.choose(request, fleet, rules, rng)
    chosen = chosen_fields(request, choice, fleet)
    was = unpack(record.head)["chosen"]
    same = (
        was is not None
        and chosen is not None
        and all(was[key] == chosen[key] for key in ("prefill", "decode"))
    )
    return {
        "policy": name,
        "known": True,
        "message": sentence(choice, request, fleet),
        "admitted": choice.admitted,
        "reason": choice.reason,
        "chosen": chosen,
        "expected": expected_fields(choice, fleet),
        "same": same,
    }
