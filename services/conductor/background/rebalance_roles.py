"""Duty: let instances change between prefill and decode as the load asks for it, when that is switched on."""

from __future__ import annotations

from functools import partial

from mooncache.conductor.state import ConductorState
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Plan once. Workers get their new role in the answer to their next report; they finish their requests."""
    if not state.section.rebalance_roles or not state.leads:
        return
    core, now_s = state.core, state.clock.now_s()
    pinned = {instance.info.instance_id for instance in core.registry if instance.role_pinned}
    served = {instance.info.model for instance in core.registry}
    state.roles.forget(served)
    for name in sorted(served):
        model = core.models.known(name)
        if model is None:
            continue
        for instance_id, role in state.roles.plan(model, core.registry, pinned, now_s):
            instance = core.registry.get(instance_id)
            was = instance.role if instance is not None else ""
            core.registry.set(instance_id, role, None, now_s)
            wish = pb.SetInstanceRequest(instance_id=instance_id, role=INSTANCE_ROLE_NUMBERS[role])
            state.note(partial(pb.JournalEntry, wish=pb.InstanceWish(request=wish)))
            state.instruments.switched(role)
            prefill, decode = state.roles.needs(name)
            log.info(
                Event.INSTANCE_REBALANCED,
                instance_id=instance_id,
                was=was,
                role=role,
                needs_prefill=round(prefill, 2),
                needs_decode=round(decode, 2),
            )
    state.announce()
