"""The states of a leg, and what becomes of one that is given up."""

from __future__ import annotations

import asyncio

import pytest

from mooncache.errors import EngineFailed
from mooncache.gateway.core.answer import TokenUsage
from mooncache.gateway.core.next_step import LegState
from mooncache.gateway.core.plan import LegRecord
from mooncache.gateway.shell.engines import Prefilled
from mooncache.gateway.shell.leg_runner import Leg
from mooncache.kvcache.leg_hint import LegRole

RECORD = LegRecord(LegRole.PREFILL, "p1")
DONE = Prefilled(TokenUsage(9, 1), None)


@pytest.mark.parametrize(
    ("state", "has_ended"),
    [
        (LegState.IDLE, False),
        (LegState.RUNNING, False),
        (LegState.ANSWERED, True),
        (LegState.FAILED, True),
    ],
)
def test_which_states_are_ends(state: LegState, has_ended: bool) -> None:
    assert state.has_ended is has_ended


async def test_a_leg_runs_until_its_answer_is_there() -> None:
    leg, go_on = Leg[Prefilled](LegRole.PREFILL), asyncio.Event()

    async def attempt() -> Prefilled:
        await go_on.wait()
        return DONE

    assert leg.state is LegState.IDLE and leg.record.instance == ""
    leg.send(RECORD, attempt())
    assert leg.state is LegState.RUNNING and leg.record is RECORD and leg.task is not None
    go_on.set()
    await asyncio.wait({leg.task})
    assert leg.state is LegState.ANSWERED and leg.answer() is DONE
    leg.drop()
    assert leg.state is LegState.IDLE and leg.record is RECORD


async def test_a_leg_that_fails_has_an_error_instead_of_an_answer() -> None:
    leg = Leg[Prefilled](LegRole.PREFILL)

    async def attempt() -> Prefilled:
        raise EngineFailed("500")

    leg.send(RECORD, attempt())
    assert leg.task is not None
    await asyncio.wait({leg.task})
    assert leg.state is LegState.FAILED
    with pytest.raises(EngineFailed):
        leg.answer()


async def test_a_leg_that_is_given_up_is_cancelled_and_another_one_may_follow() -> None:
    leg, ended = Leg[Prefilled](LegRole.PREFILL), asyncio.Event()

    async def attempt() -> Prefilled:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return DONE

    leg.send(RECORD, attempt())
    await asyncio.sleep(0)
    leg.drop()
    assert leg.state is LegState.IDLE
    await ended.wait()
    leg.drop()
    leg.send(RECORD, attempt())
    assert leg.state is LegState.RUNNING
    leg.drop()
