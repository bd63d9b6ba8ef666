"""GetWriters: who wrote what this node holds, and the writers of single blocks."""

from __future__ import annotations

import asyncio

from mooncache.auth import check_tenant_name
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.runtime.rpc import CallContext
from mooncache.store_node.ops.checks import check_keys
from mooncache.store_node.state import StoreNodeState


async def handle(
    state: StoreNodeState, request: pb.GetWritersRequest, context: CallContext
) -> pb.GetWritersResponse:
    """The figures of this moment. Raises InvalidArgument, TooLarge, Unsupported."""
    writers = state.require_writers()
    origins: list[tuple[int, int]] = []
    if request.keys:
        check_keys(request.keys)
        tenant = check_tenant_name(request.tenant)
        origins = await asyncio.to_thread(writers.origins, tenant, request.keys)
    rows = await asyncio.to_thread(writers.rows)
    return pb.GetWritersResponse(
        writers=[
            pb.WriterFigures(
                writer_id=row["id"],
                instance=row["instance"],
                build=row["build"],
                started_unix_s=row["started_unix_s"],
                block_count=row["blocks"],
                memory_bytes=row["bytes"],
                disk_block_count=row["disk_blocks"],
                disk_bytes=row["disk_bytes"],
                first_unix_s=row["first_unix_s"],
                last_unix_s=row["last_unix_s"],
            )
            for row in rows
        ],
        origins=[pb.BlockOrigin(writer_id=number, written_unix_s=when) for number, when in origins],
        refused_count=writers.core.writers_refused(),
    )
