"""What a master pays per block and per node: full reports of simulated nodes to a real master process over gRPC.

The nodes hold no bytes; they register and report as real ones do, all at once, which is what a master that comes back
to a large cluster meets.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable

from mooncache.auth import load_cluster_token
from mooncache.bench.store.metadata_cases import count_text, keys_of
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.store.ours import start_cluster
from mooncache.bench.worker import WorkerError
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.reporting.rows import Report, bar_row
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import MASTER_SERVICE

_ADD = 1
_DRAM = 1
_TENANT = 1
_BLOCK_BYTES = 4096
_RECORD = struct.Struct("<BBBBIQQ32s")
_PART_RECORDS = 65_536
_CALL_TIMEOUT_S = 60.0
_INCARNATION = 1


def _parts(node: int, blocks: int) -> list[bytes]:
    """A node's whole content as the parts of a full report."""
    records = [
        _RECORD.pack(_ADD, _DRAM, 0, 0, 0, _TENANT, _BLOCK_BYTES, key)
        for keys in keys_of(1_000 + node, blocks)
        for key in keys
    ]
    return [b"".join(records[at : at + _PART_RECORDS]) for at in range(0, len(records), _PART_RECORDS)]


async def _report(channel: GrpcChannel, node: int, blocks: int, parts: list[bytes]) -> None:
    node_id = f"simulated-{node}"
    endpoints = common_pb2.Endpoints(grpc_target="127.0.0.1:1", tcp_host="127.0.0.1", tcp_port=1)
    segment = common_pb2.Segment(id=0, tier=common_pb2.TIER_DRAM, capacity_bytes=1 << 40)
    register = master_pb2.RegisterNodeRequest(
        node_id=node_id,
        incarnation=_INCARNATION,
        host_id=node_id,
        protocol_minor=1,
        endpoints=endpoints,
        segments=[segment],
    )
    await channel.call("RegisterNode", register, master_pb2.RegisterNodeResponse, _CALL_TIMEOUT_S)
    kinds = master_pb2.ReportKind
    steps = [(kinds.REPORT_KIND_FULL_BEGIN, 0, b"")]
    steps += [(kinds.REPORT_KIND_FULL_PART, index, part) for index, part in enumerate(parts)]
    steps += [(kinds.REPORT_KIND_FULL_END, len(parts), b"")]
    for kind, index, records in steps:
        request = master_pb2.ReportBlocksRequest(
            node_id=node_id,
            incarnation=_INCARNATION,
            kind=kind,
            report_id=1,
            first_seq=blocks,
            last_seq=blocks,
            part_index=index,
            records=records,
        )
        answer = await channel.call("ReportBlocks", request, master_pb2.ReportBlocksResponse, _CALL_TIMEOUT_S)
        if answer.need_full:
            raise WorkerError(f"the master refused part {index} of a full report")


async def _measure(cluster: EmbeddedCluster, nodes: int, blocks: int) -> float:
    """Seconds from the first registration until the master has taken in every report."""
    token = load_cluster_token(cluster.token_path).text
    contents = [_parts(node, blocks // nodes) for node in range(nodes)]
    async with contextlib.AsyncExitStack() as stack:
        channels = [GrpcChannel(cluster.master_target, MASTER_SERVICE, token=token) for _ in range(nodes)]
        for channel in channels:
            stack.push_async_callback(channel.close)
        started = time.perf_counter()
        await asyncio.gather(
            *(
                _report(channel, node, blocks // nodes, parts)
                for node, (channel, parts) in enumerate(zip(channels, contents, strict=True))
            )
        )
        elapsed = time.perf_counter() - started
        status = await channels[0].call(
            "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, _CALL_TIMEOUT_S
        )
    if status.block_count != blocks // nodes * nodes:
        raise WorkerError(f"the directory holds {status.block_count} blocks instead of {blocks}")
    return elapsed


def membership_rows(report: Report, options: StoreBenchOptions, progress: Callable[[str], None]) -> None:
    """Full reports of 4 and 64 simulated nodes with 10 k to 1 M blocks between them."""
    for nodes in options.node_counts:
        for blocks in options.rebuild_blocks:
            label = f"reports of {nodes} simulated nodes, {count_text(blocks)} blocks"
            progress(label)
            with start_cluster(1, 64 << 20) as cluster:
                elapsed = asyncio.run(_measure(cluster, nodes, blocks))
            report.add(bar_row(label, elapsed / blocks * 1e6, "us/block"))
