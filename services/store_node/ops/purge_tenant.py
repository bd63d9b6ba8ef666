"""PurgeTenant: remove all blocks of a tenant and overwrite their bytes.

Pages of the native server, one after the other, and passes until one finds nothing: what was being written to a disk
is found by the next pass. Blocks that a client reads or writes just now are invisible at once, and overwritten when it
ends; they are waited for as long as the call's time allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from mooncache.auth import check_tenant_name
from mooncache.errors import OK, ConfigInvalid, DeadlineExceeded, Internal
from mooncache.proto.v1 import common_pb2
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.state import StoreNodeState
from mooncache.store_node.tenants import NodeTenants

_PAUSE_S: Final = 0.05
_LEFT_S: Final = 0.5
"""For the answer."""

PurgePage = Callable[[str, int], dict[str, int]]
"""Takes a tenant and a cursor."""

log = get_logger(__name__)


async def handle(
    state: StoreNodeState, request: pb.NodePurgeTenantRequest, context: CallContext
) -> pb.NodePurgeTenantResponse:
    """Purge, as far as the call's time goes. Raises NotLeader, StaleIncarnation, InvalidArgument."""
    state.check_fence(request.fence)
    tenant, tenants = check_tenant_name(request.tenant), state.require_tenants()
    done = common_pb2.TenantPurge(node_id=state.identity.node_id)
    while True:
        held = await _pass(tenants.purge_page, tenant, done)
        done.held_blocks = held
        if not held or state.clock.now_s() + _LEFT_S >= context.deadline_s:
            break
        await state.clock.sleep(_PAUSE_S)
    done.code = DeadlineExceeded.code if done.held_blocks else Internal.code if done.failed_blocks else OK
    if request.erase_keys:
        await _erase_keys(tenants, tenant, done)
    done.ended_wall_ms = round(state.clock.wall_s() * 1e3)
    log.info(
        Event.NODE_TENANT_PURGED, tenant=tenant, blocks=done.blocks, disk_blocks=done.disk_blocks, held=held
    )
    return pb.NodePurgeTenantResponse(purge=done)


async def _erase_keys(tenants: NodeTenants, tenant: str, done: common_pb2.TenantPurge) -> None:
    """After the records were overwritten: copies that are in no index cannot be read either."""
    try:
        ids = await asyncio.to_thread(tenants.erase_keys, tenant)
    except ConfigInvalid as error:
        log.error(Event.NODE_KEYS_REFUSED, tenant=tenant, reason=str(error))
        done.code = done.code or ConfigInvalid.code
        return
    done.keys_erased = True
    done.erased_key_ids.extend(ids)


async def _pass(page: PurgePage, tenant: str, done: common_pb2.TenantPurge) -> int:
    """One pass over all blocks; returns how many are held."""
    cursor = held = 0
    while True:
        found = await asyncio.to_thread(page, tenant, cursor)
        done.blocks += found["blocks"]
        done.bytes += found["bytes"]
        done.disk_blocks += found["disk_blocks"]
        done.disk_bytes += found["disk_bytes"]
        done.failed_blocks += found["failed_blocks"]
        held += found["held_blocks"]
        cursor = found["next_cursor"]
        if not cursor:
            return held
