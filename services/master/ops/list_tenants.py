"""ListTenants: what tenants may have, and what they hold and have done on each node."""

from __future__ import annotations

import asyncio

from mooncache import errors
from mooncache.master.core.membership import Node
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.ListTenantsRequest, context: CallContext
) -> master_pb2.ListTenantsResponse:
    """Ask all living nodes; those that do not answer are left out. Raises NotLeader."""
    state.require_leading()
    living = [node for node in state.membership.nodes.values() if node.alive]

    async def ask(node: Node) -> master_pb2.NodeTenants | None:
        asked, answer = store_node_pb2.NodeGetTenantsRequest(), store_node_pb2.NodeGetTenantsResponse
        try:
            found = await state.nodes.call(
                node, "GetTenants", asked, answer, state.limits.node_call_timeout_s
            )
        except errors.MooncacheError:
            return None
        return master_pb2.NodeTenants(
            node_id=node.node_id,
            tenants=found.tenants,
            sampled_found=found.sampled_found,
            sampled_unlimited=found.sampled_unlimited,
        )

    rows = await asyncio.gather(*map(ask, living))
    return master_pb2.ListTenantsResponse(
        table=state.tenants.to_message(), nodes=[row for row in rows if row is not None]
    )
