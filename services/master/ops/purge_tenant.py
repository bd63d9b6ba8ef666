"""PurgeTenant: all blocks of a tenant go from every node, overwritten."""

from __future__ import annotations

import asyncio

from mooncache import errors
from mooncache.auth import check_tenant_name, tenant_id
from mooncache.master.core.membership import Node
from mooncache.master.messages import fence
from mooncache.master.shell.moves_barred import moves_barred
from mooncache.master.state import MasterState
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext

_ANSWER_S = 0.5


async def handle(
    state: MasterState, request: master_pb2.PurgeTenantRequest, context: CallContext
) -> master_pb2.PurgeTenantResponse:
    """Ask all known nodes at once; one that does not answer has its error's code.

    Raises NotLeader, InvalidArgument, NodeUnavailable (a block is on its way to a node that is slow).
    """
    state.require_leading()
    tenant, term = check_tenant_name(request.tenant), state.membership.term

    async def purge(node: Node) -> common_pb2.TenantPurge:
        timeout_s = max(0.0, context.deadline_s - state.clock.now_s() - _ANSWER_S)
        asked = store_node_pb2.NodePurgeTenantRequest(
            tenant=tenant, fence=fence(term, node), erase_keys=request.erase_keys
        )
        answer = store_node_pb2.NodePurgeTenantResponse
        try:
            found = await state.nodes.call(node, "PurgeTenant", asked, answer, timeout_s)
        except errors.MooncacheError as error:
            return common_pb2.TenantPurge(node_id=node.node_id, code=error.code)
        return found.purge

    async with moves_barred(state, tenant_id(tenant), None, context) as late:
        if late:
            raise errors.NodeUnavailable(
                "Blocks of the tenant are on their way to another node, which is slow: try again."
            )
        nodes = sorted(state.membership.nodes.values(), key=lambda node: node.node_id)
        return master_pb2.PurgeTenantResponse(purges=await asyncio.gather(*map(purge, nodes)))
