"""GetNodeStatus: what the node is and holds."""

from __future__ import annotations

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState, stat


async def handle(
    state: StoreNodeState, request: pb.GetNodeStatusRequest, context: CallContext
) -> pb.GetNodeStatusResponse:
    stats = state.core.stats()
    service = {f"service_{name}": value for name, value in state.counters.items()}
    membership = state.membership
    return pb.GetNodeStatusResponse(
        node_id=state.identity.node_id,
        incarnation=state.identity.incarnation,
        host_id=state.identity.host_id,
        software_version=state.identity.software_version,
        state=state.node_state,
        endpoints=state.endpoints,
        segments=state.segments,
        used_bytes=stat(stats, "store_used_bytes"),
        pinned_bytes=stat(stats, "store_pinned_bytes"),
        block_count=stat(stats, "store_blocks"),
        last_seq=state.core.event_seq(),
        acked_seq=state.planner.acked_seq,
        master_id=membership.master_id if membership.registered else "",
        uptime_ms=max(0, int((context.now_s - state.started_s) * 1000)),
        counters={**stats, **service},
        wall_ms=int(state.clock.wall_s() * 1e3),
        formats=state.formats,
    )
