"""ListInstances: known instances; a long poll that ends when one changes."""

from __future__ import annotations

from mooncache import errors
from mooncache.conductor.config import WATCH_MAX_S, WATCHERS_MAX
from mooncache.conductor.messages import instance_message, load_message
from mooncache.conductor.state import ConductorState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.rpc import CallContext

# The answer has to be on its way before the caller's own deadline.
_ANSWER_S = 0.1


async def handle(
    state: ConductorState, request: pb.ListInstancesRequest, context: CallContext
) -> pb.ListInstancesResponse:
    """Wait for a version other than the caller's, then list. Raises LimitExceeded."""
    registry = state.core.registry
    if request.known_version and request.known_version == registry.version and request.wait_ms:
        if state.watchers >= WATCHERS_MAX:
            raise errors.LimitExceeded(f"{WATCHERS_MAX} watches are under way; poll more slowly")
        wait_s = min(request.wait_ms / 1e3, WATCH_MAX_S)
        until_s = min(context.now_s + wait_s, context.deadline_s - _ANSWER_S)
        state.watchers += 1
        try:
            while registry.version == request.known_version:
                left_s = until_s - state.clock.now_s()
                if left_s <= 0:
                    break
                await state.changed(left_s)
        finally:
            state.watchers -= 1
    return listing(state)


def listing(state: ConductorState) -> pb.ListInstancesResponse:
    """Return all instances ordered by name."""
    now_s = state.clock.now_s()
    blocks = state.core.cache.blocks()
    divided = state.core.registry.divided_models()
    response = pb.ListInstancesResponse(version=state.core.registry.version)
    for instance in sorted(state.core.registry, key=lambda i: i.info.instance_id):
        response.instances.append(
            pb.InstanceView(
                instance=instance_message(instance),
                load=load_message(instance.load),
                assigned=state.core.assigned(instance),
                cached_blocks=blocks.get(instance.holder, 0),
                report_age_ms=max(0, int((now_s - instance.reported_s) * 1e3)),
                reason=instance.reason,
                apart=state.core.registry.apart(instance) if instance.info.model in divided else "",
            )
        )
    return response
