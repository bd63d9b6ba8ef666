"""Heartbeat: a node says that it lives; the answer carries the master's wishes."""

from __future__ import annotations

from mooncache.errors import NotLeader
from mooncache.master.core.membership import Heartbeat, Node, SpaceUsage
from mooncache.master.messages import node_info, rails_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.runtime.quarantine_messages import entries_of, quarantine_message
from mooncache.runtime.rpc import CallContext
from mooncache.runtime.tenant_limits import TenantTable

TENANT_NAMES_MAX = 65536


async def handle(
    state: MasterState, request: master_pb2.HeartbeatRequest, context: CallContext
) -> master_pb2.HeartbeatResponse:
    """Note the heartbeat. Raises UnknownNode (register first), StaleIncarnation, NotLeader."""
    state.require_leading()
    if request.master_term > state.membership.term:
        raise NotLeader(
            f"node {request.node_id!r} has registered under term {request.master_term}; "
            f"this master's is {state.membership.term}"
        )
    usage = SpaceUsage(request.capacity_bytes, request.used_bytes, request.pinned_bytes, request.block_count)
    members = state.membership
    beat = Heartbeat(
        request.node_id,
        request.incarnation,
        usage,
        last_seq=request.last_seq,
        rails=rails_of(request.rails),
        draining=request.state == common_pb2.NODE_STATE_DRAINING,
        arena_gone=request.arena_gone,
    )
    node, transitions = members.heartbeat(beat, context.now_s)
    state.apply(transitions)
    if len(request.tenant_names) <= TENANT_NAMES_MAX:
        state.learn_tenants(request.tenant_names)
    if request.HasField("quarantine"):
        state.quarantine = state.quarantine.joined(entries_of(request.quarantine))
    if request.HasField("trial"):
        state.latencies.take(node.node_id, request.trial.node_id, request.trial.round_trip_us, context.now_s)
    differ = request.quarantine_mark != state.quarantine.mark()
    return master_pb2.HeartbeatResponse(
        epoch=members.epoch,
        term=members.term,
        want_full_report=state.wants_full_report(node),
        commands=_commands(node, beat.draining),
        lease_ms=round(state.limits.membership.dead_after_s * 1000),
        tenants=_newer_tenants(state, request),
        want_tenants=request.tenants_version > state.tenants.version,
        quarantine=quarantine_message(state.quarantine) if differ else None,
        want_quarantine=differ and bool(request.quarantine_mark),
        try_peer=_peer_to_try(state, node, context.now_s),
    )


def _peer_to_try(state: MasterState, node: Node, now_s: float) -> common_pb2.NodeInfo | None:
    """The node that this one is to try before its next heartbeat: who it is and where, nothing else."""
    peer = state.membership.nodes.get(state.next_peer(node.node_id, now_s))
    if peer is None:
        return None
    info = node_info(peer)
    return common_pb2.NodeInfo(
        node_id=info.node_id,
        host_id=info.host_id,
        incarnation=info.incarnation,
        endpoints=info.endpoints,
        state=info.state,
    )


def _newer_tenants(state: MasterState, request: master_pb2.HeartbeatRequest) -> common_pb2.TenantTable | None:
    """The table of tenants when the node's is older; a newer one is taken over."""
    if request.HasField("tenants"):
        found = TenantTable.from_message(request.tenants)
        if found.version > state.tenants.version:
            state.tenants = found
    is_older = request.tenants_version < state.tenants.version
    return state.tenants.to_message() if is_older else None


def _commands(node: Node, draining: bool) -> list[master_pb2.NodeCommand]:
    if node.drain_wanted and not draining:
        return [master_pb2.NODE_COMMAND_DRAIN_ON]
    if node.undrain_pending and draining:
        return [master_pb2.NODE_COMMAND_DRAIN_OFF]
    return []
