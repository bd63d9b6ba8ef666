"""What follows when a leg ends, or its instance becomes suspect, before the client has seen anything: the whole table.

A failed prefill leg is replaced until its attempts are used up, then the decode instance computes the prompt itself; a
decode leg is replaced as long as attempts are left. What an engine refuses, every engine would refuse.
"""

from __future__ import annotations

from enum import StrEnum

from mooncache.errors import EngineDied
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.plan import DECODE_ATTEMPTS, Attempts, RequestPlan
from mooncache.kvcache.leg_hint import LegRole


class LegState(StrEnum):
    """Where the leg of one role is."""

    IDLE = "idle"
    """None is under way: not sent, given up, or its end was dealt with."""
    RUNNING = "running"
    """It was sent and has not answered."""
    ANSWERED = "answered"
    """The prompt is computed, or the client's answer has begun."""
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Whether its answer or its error is there."""
        return self in (LegState.ANSWERED, LegState.FAILED)


class LegEnd(StrEnum):
    """How a leg ended."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    DIED = "died"
    """The engine process ended under it."""
    SUSPECT = "suspect"
    """It has not ended: its instance has become suspect."""


class LegStep(StrEnum):
    """What the gateway does next."""

    GO_ON = "go_on"
    SEND_PREFILL = "send_prefill"
    """The new plan's prefill leg; the decode leg goes on waiting."""
    SEND_BOTH = "send_both"
    """Both legs of the new plan; whatever is open is dropped."""
    RECOMPUTE = "recompute"
    """The decode leg again, with nothing to wait for: its instance computes the prompt."""
    FAIL = "fail"
    """The request ends with the leg's error."""


def end_of(error: BaseException | None) -> LegEnd:
    """How a leg ended, by what it raised."""
    if error is None:
        return LegEnd.DONE
    if isinstance(error, Refusal):
        return LegEnd.REFUSED
    return LegEnd.DIED if isinstance(error, EngineDied) else LegEnd.FAILED


def wants_plan(
    role: LegRole, end: LegEnd, attempts: Attempts, *, prefill_attempts: int, may_die_again: bool
) -> bool:
    """Whether the conductor is asked for another plan; `attempts` counts this failure already.

    Args:
        prefill_attempts: prefill legs that one request may have.
        may_die_again: whether this request may go to another engine after one ended under it.
    """
    if end is LegEnd.SUSPECT:
        return True
    if end in (LegEnd.DONE, LegEnd.REFUSED) or (end is LegEnd.DIED and not may_die_again):
        return False
    if role is LegRole.PREFILL:
        return attempts.prefill_failures < prefill_attempts
    return attempts.decode_failures < DECODE_ATTEMPTS


def next_step(
    role: LegRole, end: LegEnd, old: RequestPlan, new: RequestPlan | None, *, may_die_again: bool = True
) -> LegStep:
    """What to do, given the plan in force and the new one, if there is any."""
    if end is LegEnd.DONE or (end is LegEnd.SUSPECT and new is None):
        return LegStep.GO_ON  # a slow engine is better than none
    if end is LegEnd.DIED and not may_die_again:
        return LegStep.FAIL
    if new is None:
        return LegStep.RECOMPUTE if role is LegRole.PREFILL else LegStep.FAIL
    return LegStep.SEND_PREFILL if role is LegRole.PREFILL and _keeps_decode(old, new) else LegStep.SEND_BOTH


def _keeps_decode(old: RequestPlan, new: RequestPlan) -> bool:
    """Whether the running decode leg may wait for the new prefill leg, whose blocks have to come where it waits."""
    same = new.decode.instance_id == old.decode.instance_id and new.store_node == old.store_node
    return new.prefill is not None and same


def prefill_may_follow(end: LegEnd, attempts: Attempts, *, prefill_attempts: int) -> bool:
    """Whether another prefill leg may compute the blocks of one that ended so; `attempts` does not count it yet."""
    return end in (LegEnd.FAILED, LegEnd.DIED) and attempts.prefill_failures + 1 < prefill_attempts
