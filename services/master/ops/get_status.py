"""GetStatus: what this master is and knows; every master answers, leader or not."""

from __future__ import annotations

from mooncache._version import __version__
from mooncache.coordination import MasterRecord
from mooncache.master.core.membership import Node
from mooncache.master.messages import node_info, peer_latency
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.GetStatusRequest, context: CallContext
) -> master_pb2.GetStatusResponse:
    """The status. Only admins see the endpoints of nodes."""
    members = state.membership
    response = master_pb2.GetStatusResponse(
        master_id=state.master_id,
        term=members.term if state.leading else 0,
        epoch=members.epoch if state.leading else 0,
        leading=state.leading,
        masters=_masters(state, admin=context.admin),
        software_version=__version__,
        uptime_ms=round((context.now_s - state.started_s) * 1000),
        wall_ms=round(state.clock.wall_s() * 1000),
    )
    if not state.leading:
        return response
    stats = state.directory.stats()
    response.block_count = stats.get("blocks", 0)
    response.directory_memory_bytes = stats.get("memory_bytes", 0)
    response.directory_complete = state.completeness() >= 1.0
    response.active_task_count = state.tasks.active_count
    listed = state.directory.holder_blocks()
    for node in sorted(members.nodes.values(), key=lambda node: node.index):
        response.nodes.append(
            _node(state, node, listed.get(node.index, 0), context, with_latencies=request.with_latencies)
        )
    return response


def _masters(state: MasterState, *, admin: bool) -> list[master_pb2.MasterInfo]:
    known = {master.master_id: master for master in state.masters}
    known[state.master_id] = state.record or MasterRecord(state.master_id, state.grpc_target)
    if state.leader_id and state.leader_id not in known:
        known[state.leader_id] = MasterRecord(state.leader_id, state.leader_target)
    found = []
    for name, master in sorted(known.items()):
        info = master_pb2.MasterInfo(
            master_id=name, grpc_target=master.grpc_target, leader=name == state.leader_id
        )
        if admin:
            info.software_version, info.started_ms = master.software_version, master.started_ms
            info.host_id, info.host_name, info.pid = master.host_id, master.host_name, master.pid
        found.append(info)
    return found


def _node(
    state: MasterState, node: Node, listed: int, context: CallContext, *, with_latencies: bool
) -> master_pb2.NodeStatus:
    reports = state.reports_of(node)
    info = node_info(node)
    if not context.admin:
        info.ClearField("endpoints")
        for rail in info.rails:
            rail.ClearField("address")
    status = master_pb2.NodeStatus(
        node=info,
        used_bytes=node.usage.used_bytes,
        pinned_bytes=node.usage.pinned_bytes,
        block_count=node.usage.block_count,
        directory_block_count=listed,
        acked_seq=reports.acked_seq,
        last_seq=node.last_seq,
        heartbeat_age_ms=round(max(0.0, context.now_s - node.heard_s) * 1000),
        full_report_pending=node.alive and not node.complete,
        arena_gone=node.alive and node.arena_gone,
        started_ms=node.info.process.started_ms,
    )
    if context.admin:
        status.host_name, status.pid = node.info.process.host_name, node.info.process.pid
    if context.admin and with_latencies:
        status.peers.extend(peer_latency(row) for row in state.latencies.of(node.node_id, context.now_s))
    return status
