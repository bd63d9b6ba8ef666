"""GetUsage: bytes and blocks per tenant."""

from __future__ import annotations

from mooncache.master.core.usage import TenantRow
from mooncache.master.messages import tenant_of
from mooncache.master.state import MasterState
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.rpc import CallContext


async def handle(
    state: MasterState, request: master_pb2.GetUsageRequest, context: CallContext
) -> master_pb2.GetUsageResponse:
    """One tenant's row, or every tenant's for an admin who names none.

    Raises NotLeader, PermissionDenied.
    """
    state.require_leading()
    usage = state.directory.tenant_usage()
    if context.admin and not request.tenant:
        rows = state.ledger.rows(usage)
    else:
        tenant, tenant_id = tenant_of(request.tenant, context)
        state.ledger.learn(tenant_id, tenant)
        rows = [state.ledger.row(tenant_id, usage)]
    return master_pb2.GetUsageResponse(tenants=[_row(row) for row in rows])


def _row(row: TenantRow) -> master_pb2.TenantUsage:
    return master_pb2.TenantUsage(
        tenant_id=row.tenant_id, tenant=row.name, used_bytes=row.used_bytes, block_count=row.block_count
    )
