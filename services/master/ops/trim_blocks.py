"""TrimBlocks: drop copies beyond a number, but none of those that the tenant's blocks are to have.

How they are dropped is in `master/shell/trimming.py`.
"""

from __future__ import annotations

import asyncio

from mooncache import errors
from mooncache.client.keys import split_keys
from mooncache.master.core.trimming import plan_trims
from mooncache.master.messages import REPLICAS_MAX, check_replicas, tenant_of
from mooncache.master.shell.trimming import Trimming
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext

KEYS_AT_ONCE = 4096  # ranking holders is a loop, and no other call is served meanwhile


async def handle(
    state: MasterState, request: master_pb2.TrimBlocksRequest, context: CallContext
) -> master_pb2.TrimBlocksResponse:
    """Trim; one code for each key.

    Raises NotLeader, ConductorSuperseded, InvalidArgument, TooLarge, PermissionDenied, UnknownNode.
    """
    state.require_leading()
    state.obey_conductor(request.conductor_term)
    tenant, tenant_id = tenant_of(request.tenant, context)
    count = max(check_replicas(request.replica_count), state.targets().of(tenant_id))
    keys = split_keys(request.keys, state.limits.keys_per_call_max)
    if len(request.keep_node_ids) > REPLICAS_MAX:
        raise errors.InvalidArgument(f"at most {REPLICAS_MAX} nodes can be kept")
    kept = [state.membership.nodes.get(name) for name in request.keep_node_ids]
    keep = [node.index for node in kept if node is not None]
    only = state.membership.require(request.node_id).index if request.node_id else None
    async with state.trimming:
        state.require_leading()
        codes: list[int] = []
        dropped = 0
        for begin in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[begin : begin + KEYS_AT_ONCE]
            holders = state.holders(tenant_id, part)
            lasting = [[index for index in where if state.lasting(index)] for where in holders]
            known = map(bool, holders) if only is None else [only in where for where in lasting]
            found = [errors.OK if there else errors.NotFound.code for there in known]
            spare = only is not None
            work = Trimming(state, tenant, tenant_id, part, found, context.deadline_s, spare=spare)
            trims = plan_trims(part, lasting, state.candidates(), count, keep=keep, only=only)
            await work.confirm(trims)
            state.require_leading()  # another leader may trim by now, by a view of its own
            dropped += await work.drop(work.confirmed(trims))
            codes += found
            await asyncio.sleep(0)
    state.instruments.trimmed.inc(dropped)
    return master_pb2.TrimBlocksResponse(codes=codes, dropped_count=dropped)
