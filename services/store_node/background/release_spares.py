"""Duty: let go of spare copies that were not read for a while (core/spare_copies.py).

The node only asks. The master drops the copy here after another node has confirmed that it has the block; a pinned
block stays. Without a master, and while the node drains, nothing is asked: the drain moves what is worth moving.
"""

from __future__ import annotations

from typing import Final

from mooncache.errors import OK, MooncacheError
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.logs import Event, get_logger
from mooncache.store_node.state import StoreNodeState

LOOKS_PER_IDLE: Final = 5.0  # so often a copy is looked at before it is due
_LOOK_MIN_S = 0.2
_LOOK_KEYS_MAX = 4096
_ASK_KEYS_MAX = 1024  # a master asks the nodes that keep them in the same call
_LOOK_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 30.0

log = get_logger(__name__)


async def run(state: StoreNodeState) -> None:
    """Until cancelled."""
    while True:
        await state.clock.sleep(max(_LOOK_MIN_S, state.spares.idle_s / LOOKS_PER_IDLE))
        try:
            await run_once(state)
        except MooncacheError as error:
            state.count("spare_failures")
            log.warning(Event.SPARES_KEPT, code=error.name, reason=error.message)


async def run_once(state: StoreNodeState) -> None:
    """Look at every spare copy, and ask for those that are due. Raises MooncacheError."""
    if state.copier is None or state.link is None or state.draining or not state.membership.registered:
        return
    for tenant in state.spares.tenants():
        keys = state.spares.keys(tenant)
        due: list[bytes] = []
        for begin in range(0, len(keys), _LOOK_KEYS_MAX):
            part = keys[begin : begin + _LOOK_KEYS_MAX]
            reads = await state.copier.reads(tenant, b"".join(part), _LOOK_TIMEOUT_S)
            due += state.spares.looked(tenant, part, reads, state.clock.now_s())
        for begin in range(0, len(due), _ASK_KEYS_MAX):
            await _release(state, tenant, due[begin : begin + _ASK_KEYS_MAX])


async def _release(state: StoreNodeState, tenant: str, keys: list[bytes]) -> None:
    assert state.link is not None
    assert state.copier is not None
    packed = b"".join(keys)
    request = master_pb2.TrimBlocksRequest(
        keys=packed, replica_count=1, tenant=tenant, node_id=state.identity.node_id
    )
    answer = await state.link.call("TrimBlocks", request, master_pb2.TrimBlocksResponse, _ASK_TIMEOUT_S)
    there = await state.copier.reads(tenant, packed, _LOOK_TIMEOUT_S)
    for key, code, reads in zip(keys, answer.codes, there, strict=True):
        # Here and OK: it is the last copy, so it is spare no longer. With another code it is asked for again, also when
        # the master has not heard of it yet.
        if reads is None or code == OK:
            state.spares.forget(tenant, key)
    state.count("spares_released", answer.dropped_count)
    if answer.dropped_count:
        log.info(Event.SPARES_RELEASED, blocks=answer.dropped_count, asked=len(keys))
