"""ListInstances: known instances, or those that have changed; a long poll that ends when one changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mooncache import errors
from mooncache.conductor.config import BURST_S, WATCH_MAX_S, WATCHERS_MAX
from mooncache.conductor.core.registry import Instance
from mooncache.conductor.messages import gateway_of, instance_message
from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_messages import load_message
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.rpc import CallContext

# The answer has to be on its way before the caller's own deadline.
_ANSWER_S = 0.1
COUNTS_AFTER_S: Final = 15.0  # gateways that are there have asked for the list by then


async def handle(
    state: ConductorState, request: pb.ListInstancesRequest, context: CallContext
) -> pb.ListInstancesResponse:
    """Wait for a version other than the caller's, then list. Raises NotLeader, LimitExceeded, InvalidArgument."""
    state.leadership.require(request.known_term, context.now_s)
    registry = state.core.registry
    if request.HasField("gateway"):
        take_in(state, request.gateway, context.now_s)
        state.note(lambda: pb.JournalEntry(gateway=request.gateway))
    known = request.known_version == registry.version and request.known_run in (0, state.run)
    if request.known_version and known and request.wait_ms and not _has_news(state, request):
        if state.watchers >= WATCHERS_MAX:
            raise errors.LimitExceeded(f"{WATCHERS_MAX} watches are under way; poll more slowly")
        wait_s = min(request.wait_ms / 1e3, WATCH_MAX_S)
        until_s = min(context.now_s + wait_s, context.deadline_s - _ANSWER_S)
        state.watchers += 1
        try:
            while registry.version == request.known_version and not _has_news(state, request):
                left_s = until_s - state.clock.now_s()
                if left_s <= 0:
                    break
                await state.changed(left_s)
                state.leadership.require(request.known_term, state.clock.now_s())
            else:
                # Changes come in bursts: a fleet that starts again is not listed after each step of each engine.
                await state.clock.sleep(max(0.0, min(BURST_S, until_s - state.clock.now_s())))
        finally:
            state.watchers -= 1
    return listing(state, request)


def take_in(state: ConductorState, gateway: pb.Gateway, now_s: float) -> None:
    """A gateway is there. Others hear of it at once, since they share limits from then on. Raises InvalidArgument."""
    before = state.gateways.count(now_s)
    state.gateways.heard(gateway_of(gateway), now_s)
    after = state.gateways.count(now_s)
    if before < after:
        if before == 1:
            state.limits.joined(now_s)
        state.wake_watchers()


def gateway_count(state: ConductorState, now_s: float) -> int:
    """How many gateways there are; 0 while others may not have found this conductor yet."""
    count = state.gateways.count(now_s)
    return count if count > 1 or now_s - state.leadership.began_s >= COUNTS_AFTER_S else 0


def _has_news(state: ConductorState, request: pb.ListInstancesRequest) -> bool:
    """Whether the caller knows another number of gateways."""
    if not request.HasField("known_gateways"):
        return False
    return request.known_gateways != gateway_count(state, state.clock.now_s())


def listing(state: ConductorState, request: pb.ListInstancesRequest) -> pb.ListInstancesResponse:
    """The instances ordered by name: all, or those that have changed since the version that the caller knows."""
    registry = state.core.registry
    response = pb.ListInstancesResponse(version=registry.version, run=state.run, term=state.leadership.term)
    changes = registry.changes(request.known_version) if request.known_run == state.run else None
    listed: Iterable[Instance] = registry
    if changes is not None:
        response.delta = True
        listed, gone = changes
        response.gone.extend(gone)
    now_s = state.clock.now_s()
    response.gateway_count = gateway_count(state, now_s)
    blocks = state.core.cache.blocks()
    divided = registry.divided_models()
    passports: dict[str, int] = {}
    for instance in sorted(listed, key=lambda i: i.info.instance_id):
        view = pb.InstanceView(
            instance=instance_message(instance),
            load=load_message(instance.load),
            assigned=state.core.assigned(instance),
            cached_blocks=blocks.get(instance.holder, 0),
            report_age_ms=max(0, int((now_s - instance.reported_s) * 1e3)),
            reason=instance.reason,
            apart=registry.apart(instance) if instance.info.model in divided else "",
        )
        passport = view.instance.passport_json
        if request.passports_apart and passport:
            view.passport = passports.setdefault(passport, len(passports) + 1)
            view.instance.passport_json = ""
        response.instances.append(view)
    response.passports.extend(passports)
    return response
