"""WatchClusterMap: a long poll that ends when the map changes or the wait is over."""

from __future__ import annotations

from mooncache import errors
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext

# The answer has to be on its way before the caller's own deadline.
_ANSWER_S = 0.1


async def handle(
    state: MasterState, request: master_pb2.WatchClusterMapRequest, context: CallContext
) -> master_pb2.WatchClusterMapResponse:
    """Wait for a map other than the caller's. Raises NotLeader (also when leadership ends), LimitExceeded."""
    state.require_leading()
    if state.watchers >= state.limits.watchers_max:
        raise errors.LimitExceeded(f"{state.limits.watchers_max} map watches are under way; poll more slowly")
    wait_s = min(request.wait_ms / 1000.0, state.limits.watch_max_s)
    until_s = min(context.now_s + wait_s, context.deadline_s - _ANSWER_S)
    known = (request.known_term, request.known_epoch)
    state.watchers += 1
    try:
        while (state.membership.term, state.membership.epoch) == known:
            left_s = until_s - state.clock.now_s()
            if left_s <= 0:
                return master_pb2.WatchClusterMapResponse(changed=False)
            await state.map_changed(left_s)
            state.require_leading()
    finally:
        state.watchers -= 1
    return master_pb2.WatchClusterMapResponse(changed=True, map=state.cluster_map())
