"""GetTenants: what tenants hold and have done here, and how much unlimited memory would have found."""

from __future__ import annotations

import asyncio

from mooncache.proto.v1 import common_pb2
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState, stat


async def handle(
    state: StoreNodeState, request: pb.NodeGetTenantsRequest, context: CallContext
) -> pb.NodeGetTenantsResponse:
    """The figures of this moment."""
    tenants = state.require_tenants()
    await asyncio.to_thread(tenants.tend)
    rows = [common_pb2.TenantFigures(tenant=name, figures=row) for name, row in tenants.figures.items()]
    stats = state.core.stats()
    return pb.NodeGetTenantsResponse(
        tenants=rows,
        sampled_found=stat(stats, "store_sampled_found"),
        sampled_unlimited=stat(stats, "store_sampled_unlimited"),
    )
