"""Duty: be registered with the leading master, and send heartbeats.

The node serves with or without a master; this duty only ever waits and tries again, with jittered back-off, one
target after the other. A master that does not know the node (new leader, restart) is answered by a registration;
a new term always leads to a full report.
"""

from __future__ import annotations

import asyncio

from mooncache.client.terms import PATIENCE_S
from mooncache.errors import MooncacheError, NotLeader, StaleIncarnation, UnknownNode
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.backoff import Backoff
from mooncache.runtime.formats import CONTROL_MINOR_NOW
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.quarantine_messages import entries_of, quarantine_message
from mooncache.runtime.tenant_limits import TenantTable
from mooncache.store_node.state import StoreNodeState, arena_gone, stat

_INTERVAL_MIN_S = 0.05
_INTERVAL_MAX_S = 60.0

log = get_logger(__name__)


async def run(state: StoreNodeState) -> None:
    """Until cancelled."""
    backoff = Backoff(state.rng, first_s=0.1, cap_s=2.0)
    lost_logged = False
    while True:
        try:
            if not state.membership.registered:
                await register(state)
            await heartbeat(state)
        except (UnknownNode, StaleIncarnation):
            state.forget_master()
            state.wake_membership.clear()
            await state.clock.sleep(backoff.next_s())
            continue
        except MooncacheError as error:
            silent_s = state.clock.now_s() - state.membership.heard_s
            state.count("master_call_failures")
            if not lost_logged and silent_s >= state.membership.heartbeat_interval_s:
                lost_logged = True
                log.warning(Event.NODE_MASTER_LOST, code=error.name, reason=error.message)
            await state.clock.sleep(backoff.next_s())
            continue
        backoff.reset()
        lost_logged = False
        await _pause(state)


async def _pause(state: StoreNodeState) -> None:
    """One heartbeat interval, a little shortened at random so that nodes do not march in step."""
    interval_s = state.membership.heartbeat_interval_s * (0.8 + 0.2 * state.rng.random())
    waker = asyncio.ensure_future(state.wake_membership.wait())
    sleeper = asyncio.ensure_future(state.clock.sleep(interval_s))
    try:
        await asyncio.wait((waker, sleeper), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waker.cancel()
        sleeper.cancel()
        state.wake_membership.clear()


async def register(state: StoreNodeState) -> None:
    """One attempt to register with the current target.

    Raises:
        MooncacheError: no master answered, or the master refused; the next attempt goes to the next target.
    """
    assert state.link is not None
    identity = state.identity
    response = await state.link.call_once(
        "RegisterNode",
        master_pb2.RegisterNodeRequest(
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            host_id=identity.host_id,
            software_version=identity.software_version,
            protocol_minor=CONTROL_MINOR_NOW,
            endpoints=state.endpoints,
            segments=state.segments,
            started_ms=identity.started_wall_ms,
            rails=state.rails(),
            labels=identity.labels,
            host_name=identity.host_name,
            pid=identity.pid,
        ),
        master_pb2.RegisterNodeResponse,
        state.call_timeout_s,
    )
    if not state.terms.hear(response.term, state.clock.now_s()):
        state.link.pass_over()
        if state.terms.refusals == 1:
            log.warning(
                Event.MASTER_TERM_OLDER,
                master_id=response.master_id,
                term=response.term,
                newest_term=state.terms.newest,
                patience_s=PATIENCE_S,
            )
        raise NotLeader(
            f"{response.master_id} leads under term {response.term}, older than {state.terms.newest}"
        )
    membership = state.membership
    if (membership.term, membership.master_id) != (response.term, response.master_id):
        state.planner.detach()
    membership.registered = True
    membership.master_id = response.master_id
    membership.term = response.term
    membership.node_index = response.node_index
    membership.heartbeat_interval_s = _bounded(response.heartbeat_interval_ms)
    membership.lease_s = response.lease_ms / 1000.0
    membership.heard_s = state.clock.now_s()
    state.planner.attach(response.want_full_report)
    state.count("registrations")
    log.info(
        Event.NODE_REGISTERED, master_id=response.master_id, term=response.term, index=response.node_index
    )


async def heartbeat(state: StoreNodeState) -> None:
    """One heartbeat; carries out what the master wishes in its answer.

    Raises:
        UnknownNode, StaleIncarnation: the master wants a registration.
        MooncacheError: no master answered.
    """
    assert state.link is not None
    stats, tenants, quarantine = state.core.stats(), state.tenants, state.quarantine
    response = await state.link.call_once(
        "Heartbeat",
        master_pb2.HeartbeatRequest(
            node_id=state.identity.node_id,
            incarnation=state.identity.incarnation,
            master_term=state.membership.term,
            capacity_bytes=stat(stats, "store_capacity_bytes"),
            used_bytes=stat(stats, "store_used_bytes"),
            pinned_bytes=stat(stats, "store_pinned_bytes"),
            block_count=stat(stats, "store_blocks"),
            state=state.node_state,
            tenant_names=state.core.tenants(),
            last_seq=state.core.event_seq(),
            rails=state.rails(),
            arena_gone=arena_gone(stats),
            tenants_version=tenants.table.version if tenants is not None else 0,
            tenants=tenants.table.to_message() if tenants is not None and tenants.wanted else None,
            quarantine_mark=quarantine.table.mark() if quarantine is not None else 0,
            quarantine=quarantine_message(quarantine.table)
            if quarantine is not None and quarantine.wanted
            else None,
            trial=state.trials.take(),
        ),
        master_pb2.HeartbeatResponse,
        min(state.call_timeout_s, max(1.0, state.membership.heartbeat_interval_s * 2)),
    )
    state.membership.heard_s = state.clock.now_s()
    state.count("heartbeats")
    if response.term != state.membership.term:
        raise UnknownNode("the answering master leads another term")
    state.terms.hear(response.term, state.membership.heard_s)
    if response.want_full_report and not state.planner.reporting_full:
        state.planner.request_full("requested in a heartbeat's answer")
    if tenants is not None:
        tenants.wanted = response.want_tenants
        if response.HasField("tenants"):
            tenants.take(TenantTable.from_message(response.tenants))
    if quarantine is not None:
        quarantine.wanted = response.want_quarantine
        quarantine.take(entries_of(response.quarantine))
    if response.HasField("try_peer"):
        state.trials.wish(response.try_peer)
    for command in response.commands:
        if command == master_pb2.NODE_COMMAND_DRAIN_ON:
            _drain(state, draining=True)
        elif command == master_pb2.NODE_COMMAND_DRAIN_OFF:
            _drain(state, draining=False)


def _drain(state: StoreNodeState, *, draining: bool) -> None:
    if state.draining != draining:
        state.set_draining(draining)
        log.info(Event.DRAIN_STARTED if draining else Event.DRAIN_FINISHED, node_id=state.identity.node_id)


def _bounded(interval_ms: int) -> float:
    """A heartbeat interval that cannot turn the node into a storm or a corpse."""
    return min(max(interval_ms / 1000.0, _INTERVAL_MIN_S), _INTERVAL_MAX_S)
