"""SetTenants: the limits of all tenants, at once."""

from __future__ import annotations

from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.runtime.tenant_limits import TenantTable
from mooncache.store_node.state import StoreNodeState


async def handle(
    state: StoreNodeState, request: pb.NodeSetTenantsRequest, context: CallContext
) -> pb.NodeSetTenantsResponse:
    """Take a newer table; answer which version is in force. Raises NotLeader, StaleIncarnation, InvalidArgument."""
    state.check_fence(request.fence)
    tenants = state.require_tenants()
    tenants.take(TenantTable.from_message(request.table))
    return pb.NodeSetTenantsResponse(version=tenants.table.version)
