"""What follows when a leg ends: each row of the table by name."""

from __future__ import annotations

import pytest

from mooncache.errors import EngineDied, EngineFailed, EngineTimeout, PromptTooLong
from mooncache.gateway.core import faults
from mooncache.gateway.core.next_step import LegEnd, LegStep, end_of, next_step, wants_plan
from mooncache.gateway.core.plan import DECODE_ATTEMPTS, Attempts, LegPlan, RequestPlan
from mooncache.kvcache.leg_hint import LegRole

PREFILL, DECODE = LegRole.PREFILL, LegRole.DECODE
DONE, REFUSED, FAILED, DIED, SUSPECT = LegEnd
A, B, C = (LegPlan(name, "") for name in "abc")
OLD = RequestPlan(A, B)
SAME_DECODE = RequestPlan(A, C)
OTHER_DECODE = RequestPlan(C, B)
NO_PREFILL = RequestPlan(A)


@pytest.mark.parametrize(
    ("role", "end", "new", "step"),
    [
        pytest.param(PREFILL, DONE, None, LegStep.GO_ON, id="the prompt is computed"),
        pytest.param(
            PREFILL, FAILED, SAME_DECODE, LegStep.SEND_PREFILL, id="another instance computes the prompt"
        ),
        pytest.param(PREFILL, FAILED, OTHER_DECODE, LegStep.SEND_BOTH, id="the new plan decodes elsewhere"),
        pytest.param(PREFILL, FAILED, NO_PREFILL, LegStep.SEND_BOTH, id="the new plan has no prefill leg"),
        pytest.param(
            PREFILL, FAILED, None, LegStep.RECOMPUTE, id="no instance is left to compute the prompt"
        ),
        pytest.param(PREFILL, DIED, SAME_DECODE, LegStep.SEND_PREFILL, id="the prefill engine died"),
        pytest.param(
            PREFILL, REFUSED, None, LegStep.RECOMPUTE, id="the decode leg's answer tells the client why"
        ),
        pytest.param(
            PREFILL, SUSPECT, SAME_DECODE, LegStep.SEND_PREFILL, id="away from a stopped prefill engine"
        ),
        pytest.param(
            PREFILL, SUSPECT, OTHER_DECODE, LegStep.SEND_BOTH, id="away from it with another decode engine"
        ),
        pytest.param(PREFILL, SUSPECT, None, LegStep.GO_ON, id="a slow prefill engine is better than none"),
        pytest.param(DECODE, DONE, None, LegStep.GO_ON, id="the answer begins"),
        pytest.param(DECODE, FAILED, SAME_DECODE, LegStep.SEND_BOTH, id="another instance decodes"),
        pytest.param(DECODE, FAILED, None, LegStep.FAIL, id="no instance is left to decode"),
        pytest.param(DECODE, DIED, OTHER_DECODE, LegStep.SEND_BOTH, id="the decode engine died"),
        pytest.param(DECODE, REFUSED, None, LegStep.FAIL, id="every engine would refuse it"),
        pytest.param(
            DECODE, SUSPECT, OTHER_DECODE, LegStep.SEND_BOTH, id="away from a stopped decode engine"
        ),
        pytest.param(DECODE, SUSPECT, None, LegStep.GO_ON, id="a slow decode engine is better than none"),
    ],
)
def test_what_follows_when_a_leg_ends(
    role: LegRole, end: LegEnd, new: RequestPlan | None, step: LegStep
) -> None:
    assert next_step(role, end, OLD, new) is step


@pytest.mark.parametrize("role", LegRole)
@pytest.mark.parametrize("new", [None, SAME_DECODE])
def test_a_request_that_ends_engines_gets_no_other_one(role: LegRole, new: RequestPlan | None) -> None:
    assert next_step(role, DIED, OLD, new, may_die_again=False) is LegStep.FAIL


@pytest.mark.parametrize(
    ("role", "end", "prefill_failures", "decode_failures", "may_die_again", "asks"),
    [
        pytest.param(PREFILL, FAILED, 1, 0, True, True, id="prefill attempts are left"),
        pytest.param(PREFILL, FAILED, 2, 0, True, False, id="prefill attempts are used up"),
        pytest.param(
            DECODE, FAILED, 2, DECODE_ATTEMPTS - 1, True, True, id="decode attempts are counted apart"
        ),
        pytest.param(DECODE, FAILED, 0, DECODE_ATTEMPTS, True, False, id="decode attempts are used up"),
        pytest.param(DECODE, DIED, 0, 1, True, True, id="one engine may die"),
        pytest.param(DECODE, DIED, 0, 1, False, False, id="not one after the other"),
        pytest.param(PREFILL, REFUSED, 0, 0, True, False, id="a refusal is final"),
        pytest.param(DECODE, SUSPECT, 0, DECODE_ATTEMPTS, True, True, id="leaving costs no attempt"),
        pytest.param(PREFILL, DONE, 0, 0, True, False, id="nothing failed"),
    ],
)
def test_when_the_conductor_is_asked_again(
    role: LegRole, end: LegEnd, prefill_failures: int, decode_failures: int, may_die_again: bool, asks: bool
) -> None:
    attempts = Attempts(prefill_failures=prefill_failures, decode_failures=decode_failures)
    assert wants_plan(role, end, attempts, prefill_attempts=2, may_die_again=may_die_again) is asks


def test_how_a_leg_ended_is_told_by_its_error() -> None:
    assert end_of(None) is DONE
    assert end_of(faults.refuse(PromptTooLong("too long"))) is REFUSED
    assert end_of(EngineDied("gone")) is DIED
    assert end_of(EngineTimeout("late")) is end_of(EngineFailed("500")) is FAILED
