"""Duty: be registered with the conductor, report load and cache changes, and carry out what it wishes.

The conductor's state is soft: whatever it does not know is reported again. Without it the engine goes on; reports
are tried again with jittered back-off, and a report of cache changes that got no answer is sent again under
its number.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final

from mooncache.errors import InstanceUnknown, MooncacheError, StaleIncarnation, TooLarge
from mooncache.kvcache.instance_messages import INSTANCE_ROLES, load_message
from mooncache.kvcache.leg_messages import cache_message
from mooncache.kvcache.leg_reports import EndedLeg
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.backoff import Backoff
from mooncache.runtime.logs import Event, get_logger
from mooncache.worker.state import WorkerCounter, WorkerState

_INTERVAL_MIN_S, _INTERVAL_MAX_S = 0.02, 60.0
_CALL_TIMEOUT_S = 2.0
ENDED_LEGS_MAX: Final = 1024
"""Ended legs in one report; the rest comes at once with the next."""

log = get_logger(__name__)


async def run(state: WorkerState) -> None:
    """Until cancelled."""
    backoff = Backoff(state.rng, first_s=0.1, cap_s=2.0)
    interval_s = state.config.conductor.report_interval_s
    known_version = -1
    lost = taken = False
    while True:
        state.wake_report.clear()
        try:
            if not state.registered or known_version != state.version:
                known_version = state.version
                interval_s = await register(state)
            interval_s = await report(state) or interval_s
            state.heard_s = state.clock.now_s()
        except InstanceUnknown:
            state.registered = False
            await state.clock.sleep(backoff.next_s())
            continue
        except StaleIncarnation as error:
            state.registered = False
            state.count(WorkerCounter.CONDUCTOR_CALL_FAILURES)
            if not taken:
                taken = True
                log.error(
                    Event.WORKER_NAME_TAKEN,
                    instance_id=state.instance_id,
                    code=error.name,
                    reason=error.message,
                )
            await state.clock.sleep(backoff.next_s())
            continue
        except MooncacheError as error:
            known_version = -1
            state.count(WorkerCounter.CONDUCTOR_CALL_FAILURES)
            if not lost:
                lost = True
                log.warning(Event.WORKER_CONDUCTOR_LOST, code=error.name, reason=error.message)
            await state.clock.sleep(backoff.next_s())
            continue
        if lost:
            log.info(Event.WORKER_CONDUCTOR_FOUND, target=state.link.target)
        lost = taken = False
        backoff.reset()
        await _pause(state, interval_s)


async def _pause(state: WorkerState, interval_s: float) -> None:
    """One interval, shorter when there is news."""
    waker = asyncio.ensure_future(state.wake_report.wait())
    sleeper = asyncio.ensure_future(state.clock.sleep(interval_s))
    try:
        await asyncio.wait((waker, sleeper), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waker.cancel()
        sleeper.cancel()


async def register(state: WorkerState) -> float:
    """Tell the conductor who the instance is; returns the interval of reports in seconds."""
    request = pb.RegisterInstanceRequest(
        instance=state.instance(),
        worker_run=state.worker_run,
        drain=state.drain_asked,
        role_pinned=state.role_pinned,
    )
    response = await state.link.call(
        "RegisterInstance", request, pb.RegisterInstanceResponse, _CALL_TIMEOUT_S
    )
    if not state.registered and state.cache is not None:
        state.cache.want_full()
    state.registered = True
    state.heard_s, state.lease_s = state.clock.now_s(), response.lease_ms / 1000.0
    state.count(WorkerCounter.REGISTRATIONS)
    log.info(
        Event.WORKER_REGISTERED,
        instance_id=state.instance_id,
        incarnation=str(request.instance.incarnation),
        doing=state.doing,
    )
    _switch(state, response.role)
    state.role_pinned = response.role_pinned
    return _interval_s(response.report_interval_ms) or state.config.conductor.report_interval_s


def _interval_s(milliseconds: int) -> float:
    """The interval that the conductor asks for; 0 without one."""
    return min(max(milliseconds / 1e3, _INTERVAL_MIN_S), _INTERVAL_MAX_S) if milliseconds else 0.0


async def report(state: WorkerState) -> float:
    """One report, and what its answer wishes; returns the wished interval in seconds, 0 when there is none.

    Raises:
        InstanceUnknown: the conductor has forgotten the instance, or knows an older run of the engine.
    """
    cache, incarnation = state.cache, state.incarnation
    changes = cache.next_report() if cache is not None else None
    request = pb.ReportInstanceRequest(
        instance_id=state.instance_id,
        incarnation=incarnation,
        state=state.instance_state,
        load=load_message(state.load),
        reason="" if state.instance_state == pb.INSTANCE_STATE_READY else state.doing,
    )
    legs = list(islice(state.ended_legs, ENDED_LEGS_MAX))
    for leg in legs:
        request.ended_legs.add(decision_id=leg.decision_id, cache=cache_message(leg.cache))
    if changes is not None:
        request.changes.full, request.changes.sequence = changes.full, changes.sequence
        request.changes.stored, request.changes.removed = changes.stored, changes.removed
    try:
        response = await state.link.call(
            "ReportInstance", request, pb.ReportInstanceResponse, _CALL_TIMEOUT_S
        )
    except TooLarge:
        if cache is not None:
            cache.acknowledged()  # sending the same again would be refused again
        raise
    state.count(WorkerCounter.REPORTS)
    _heard(state, legs)
    if cache is not None and changes is not None:
        cache.acknowledged()
        if response.want_full:
            cache.want_full()
    elif cache is not None and response.want_full:
        cache.want_full()
    _switch(state, response.role)
    state.role_pinned = response.role_pinned
    # A conductor that was started again has no answer until it is asked; then the instance stays as it is.
    if response.HasField("drain") and response.drain != state.drain_asked:
        was, state.drain_asked = bool(state.drain_asked), response.drain
        if was != response.drain:
            log.info(
                Event.WORKER_DRAINING if response.drain else Event.WORKER_DRAIN_ENDED,
                instance_id=state.instance_id,
            )
    return _interval_s(response.report_interval_ms)


def _heard(state: WorkerState, legs: list[EndedLeg]) -> None:
    """The conductor has these; others may have come, and the oldest of these gone, while it was called."""
    for leg in legs:
        if state.ended_legs and state.ended_legs[0] is leg:
            state.ended_legs.popleft()
    if len(legs) == ENDED_LEGS_MAX and state.ended_legs:
        state.wake_report.set()


def _switch(state: WorkerState, role: pb.InstanceRole) -> None:
    """Take the role that the conductor names. The engine is the same for all roles; others ask the conductor."""
    wanted = INSTANCE_ROLES.get(role, state.role)
    if wanted != state.role:
        log.info(Event.WORKER_ROLE_SWITCHED, instance_id=state.instance_id, was=state.role, role=wanted)
        state.role = wanted
