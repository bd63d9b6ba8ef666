"""Copies keep the writer of the block: the node that copied asks the source who wrote it, and says so here.

It asks behind the copy. A source that does not answer, or is too old to know the question, leaves the copies without a
known writer; that is counted, and never makes a copy fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mooncache.client.keys import split_keys
from mooncache.errors import OK, MooncacheError
from mooncache.proto.v1 import common_pb2
from mooncache.proto.v1 import store_node_pb2 as pb
from mooncache.store_node.state import StoreNodeState


async def take_over_origins(
    state: StoreNodeState,
    source: common_pb2.NodeInfo,
    tenant: str,
    keys: bytes,
    codes: Sequence[int],
    timeout_s: float,
) -> None:
    """Of the keys that were copied (code 0): who wrote them first, and when."""
    made = b"".join(key for key, code in zip(split_keys(keys), codes, strict=True) if code == OK)
    if not made or state.writers is None or state.channel_for is None:
        return
    count = len(made) // 32
    origins: list[tuple[int, int]] = []
    channel = state.channel_for(source.endpoints.grpc_target) if source.endpoints.grpc_target else None
    if channel is not None:
        try:
            request = pb.GetWritersRequest(tenant=tenant, keys=made)
            answer = await channel.call("GetWriters", request, pb.GetWritersResponse, timeout_s)
            origins = [(one.writer_id, one.written_unix_s) for one in answer.origins]
        except MooncacheError:
            origins = []
        finally:
            await channel.close()
    if len(origins) != count:
        state.count("copies_without_writer", count)
        return
    await asyncio.to_thread(state.writers.set_origins, tenant, made, origins)
