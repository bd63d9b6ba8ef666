"""LeaseLimits: a gateway says what it uses of tenants' limits, and hears what it may use until it asks again."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.core.limit_book import LEASE_S
from mooncache.conductor.messages import USES_MAX, limit_use_of, named
from mooncache.conductor.ops.list_instances import gateway_count
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext


async def handle(
    state: ConductorState, request: pb.LeaseLimitsRequest, context: CallContext
) -> pb.LeaseLimitsResponse:
    """Give slices until they are asked for again. Raises NotLeader, InvalidArgument, TooLarge, LimitExceeded."""
    state.leadership.require(request.known_term, context.now_s)
    if len(request.uses) > USES_MAX:
        raise errors.TooLarge(f"{len(request.uses)} limits in one call; at most {USES_MAX} are taken.")
    uses = [limit_use_of(use) for use in request.uses]
    gateway = f"{named(request.gateway_id, 'gateway_id')}/{request.gateway_run}"
    now_s = state.clock.now_s()
    state.limits.open(gateway, request.sequence)
    found = [state.limits.lease(gateway, use, now_s) for use in uses]
    if request.whole:
        state.limits.reported_all(request.gateway_id, state.gateways.names(now_s))
    return pb.LeaseLimitsResponse(
        leases=[
            pb.LimitLease(
                slice=lease.slice, left=lease.left, spent_all=lease.spent.all, spent_own=lease.spent.own
            )
            for lease in found
        ],
        lease_ms=round(LEASE_S * 1e3),
        run=state.limits_run,
        gateway_count=gateway_count(state, now_s),
        term=state.leadership.term,
    )
