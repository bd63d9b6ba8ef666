"""SetTenant: the limits of one tenant, on every node."""

from __future__ import annotations

import asyncio

from mooncache import errors
from mooncache.master.core.membership import Node
from mooncache.master.messages import fence
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext
from mooncache.runtime.tenant_limits import limits_of


async def handle(
    state: MasterState, request: master_pb2.SetTenantRequest, context: CallContext
) -> master_pb2.SetTenantResponse:
    """Change the table and give it to all living nodes. Raises NotLeader, InvalidArgument."""
    state.require_leading()
    limits = limits_of(request.limits)
    state.tenants = state.tenants.with_limits(
        request.limits.tenant, limits, round(state.clock.wall_s() * 1e3)
    )
    table, term = state.tenants, state.membership.term
    living = [node for node in state.membership.nodes.values() if node.alive]

    async def give(node: Node) -> str:
        asked = store_node_pb2.NodeSetTenantsRequest(table=table.to_message(), fence=fence(term, node))
        answer = store_node_pb2.NodeSetTenantsResponse
        try:
            await state.nodes.call(node, "SetTenants", asked, answer, state.limits.node_call_timeout_s)
        except errors.MooncacheError:
            return ""  # its next heartbeat brings it
        return node.node_id

    taken = await asyncio.gather(*map(give, living))
    return master_pb2.SetTenantResponse(version=table.version, node_ids=sorted(filter(None, taken)))
