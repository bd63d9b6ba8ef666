"""Between protos and the core's plain data. Everything a message claims is checked here, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

from mooncache import errors
from mooncache.auth import tenant_id
from mooncache.config.labels import checked_labels
from mooncache.master.core.membership import (
    Endpoints,
    Node,
    NodeProcess,
    NodeState,
    Rail,
    Registration,
    Segment,
)
from mooncache.master.core.peer_latency import PeerLatency
from mooncache.master.core.task_types import TaskKind, TaskState
from mooncache.master.core.tasks import Task
from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2
from mooncache.runtime.rpc import CallContext

NAME_CHARS_MAX = 255
REPLICAS_MAX = 64
SEGMENTS_MAX = 4096
RAILS_MAX = 64

# A joining node serves already, hence clients see it as active; its weight makes it start slowly.
NODE_STATES = {
    NodeState.JOINING: common_pb2.NODE_STATE_ACTIVE,
    NodeState.ACTIVE: common_pb2.NODE_STATE_ACTIVE,
    NodeState.SUSPECT: common_pb2.NODE_STATE_SUSPECT,
    NodeState.DRAINING: common_pb2.NODE_STATE_DRAINING,
    NodeState.DEAD: common_pb2.NODE_STATE_DEAD,
}
TASK_KINDS = {
    TaskKind.REPLICATE: master_pb2.TASK_KIND_REPLICATE,
    TaskKind.DRAIN: master_pb2.TASK_KIND_DRAIN,
}
TASK_STATES = {
    TaskState.QUEUED: master_pb2.TASK_STATE_QUEUED,
    TaskState.RUNNING: master_pb2.TASK_STATE_RUNNING,
    TaskState.DONE: master_pb2.TASK_STATE_DONE,
    TaskState.FAILED: master_pb2.TASK_STATE_FAILED,
    TaskState.CANCELLED: master_pb2.TASK_STATE_CANCELLED,
}


def check_name(text: str, what: str) -> str:
    """A name that is not empty and not too long. Raises InvalidArgument."""
    if not text or len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise errors.InvalidArgument(f"{what} must have 1 to {NAME_CHARS_MAX} printable characters")
    return text


def check_replicas(count: int) -> int:
    """A number of copies that can be asked for. Raises InvalidArgument."""
    if not 1 <= count <= REPLICAS_MAX:
        raise errors.InvalidArgument(f"replica_count must be in 1..{REPLICAS_MAX}, not {count}")
    return count


def registration_of(request: master_pb2.RegisterNodeRequest) -> Registration:
    """A node's description of itself. Raises InvalidArgument."""
    if len(request.segments) > SEGMENTS_MAX:
        raise errors.InvalidArgument(f"{len(request.segments)} segments; a node has at most {SEGMENTS_MAX}")
    if not 0 <= request.endpoints.tcp_port < 65536:
        raise errors.InvalidArgument(f"{request.endpoints.tcp_port} is not a TCP port")
    for text in (request.endpoints.grpc_target, request.endpoints.tcp_host, request.endpoints.unix_path):
        if len(text) > NAME_CHARS_MAX:
            raise errors.InvalidArgument(f"an endpoint has more than {NAME_CHARS_MAX} characters")
    try:
        labels = checked_labels(request.labels)
    except ValueError as refused:
        raise errors.InvalidArgument(f"labels of {request.node_id[:64]!r}: {refused}") from None
    return Registration(
        node_id=check_name(request.node_id, "node_id"),
        incarnation=request.incarnation,
        host_id=check_name(request.host_id, "host_id"),
        endpoints=Endpoints(
            grpc_target=request.endpoints.grpc_target,
            tcp_host=request.endpoints.tcp_host,
            tcp_port=request.endpoints.tcp_port,
            unix_path=request.endpoints.unix_path,
            tls=request.endpoints.tls,
        ),
        software_version=request.software_version[:NAME_CHARS_MAX],
        protocol_minor=request.protocol_minor,
        segments=tuple(Segment(s.id, s.tier, s.capacity_bytes, _shown(s.kind)) for s in request.segments),
        labels=tuple(labels.items()),
        process=NodeProcess(min(request.started_ms, 1 << 53), _shown(request.host_name), request.pid),
    )


def rails_of(rails: Iterable[common_pb2.RdmaRail]) -> tuple[Rail, ...]:
    """A node's RDMA ports, the first RAILS_MAX of them."""
    return tuple(
        Rail(
            device=_shown(rail.device),
            port=rail.port,
            address=_shown(rail.address),
            link_layer=_shown(rail.link_layer),
            numa_node=rail.numa_node,
            megabits_per_s=rail.megabits_per_s,
            mtu_bytes=rail.mtu_bytes,
            up=rail.up,
            connections=rail.connections,
            grants=rail.grants,
            granted_bytes=rail.granted_bytes,
        )
        for rail, _ in zip(rails, range(RAILS_MAX), strict=False)
    )


def _shown(text: str) -> str:
    """The printable characters of a text."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:NAME_CHARS_MAX])


def peer_latency(row: PeerLatency) -> master_pb2.PeerLatency:
    """A way between two nodes as GetStatus shows it."""
    return master_pb2.PeerLatency(
        node_id=row.node_id,
        median_us=row.median_us,
        least_us=row.least_us,
        tries=row.tries,
        failures=row.failures,
        age_ms=round(row.age_s * 1000),
    )


def node_info(node: Node) -> common_pb2.NodeInfo:
    """A node as the cluster map shows it."""
    ends = node.info.endpoints
    return common_pb2.NodeInfo(
        index=node.index,
        node_id=node.node_id,
        host_id=node.info.host_id,
        incarnation=node.incarnation,
        endpoints=common_pb2.Endpoints(
            grpc_target=ends.grpc_target,
            tcp_host=ends.tcp_host,
            tcp_port=ends.tcp_port,
            unix_path=ends.unix_path,
            tls=ends.tls,
        ),
        state=NODE_STATES[node.state],
        capacity_bytes=node.usage.capacity_bytes,
        free_bytes=node.published_free_bytes,
        weight=node.weight,
        software_version=node.info.software_version,
        rails=[common_pb2.RdmaRail(**dataclasses.asdict(rail)) for rail in node.rails],
        segments=[
            common_pb2.Segment(
                id=s.segment_id,
                tier=cast("common_pb2.Tier", s.tier),
                capacity_bytes=s.capacity_bytes,
                kind=s.kind,
            )
            for s in node.info.segments
        ],
        labels=dict(node.info.labels),
    )


def cluster_map(nodes: Iterable[Node], term: int, epoch: int, leader: str) -> common_pb2.ClusterMap:
    """The map of these nodes, ordered by index."""
    ordered = sorted(nodes, key=lambda node: node.index)
    return common_pb2.ClusterMap(
        epoch=epoch, term=term, leader=leader, nodes=[node_info(node) for node in ordered]
    )


def task_message(task: Task, now_s: float) -> master_pb2.Task:
    """A task as GetTask shows it."""
    return master_pb2.Task(
        task_id=task.task_id,
        kind=TASK_KINDS[task.kind],
        state=TASK_STATES[task.state],
        node_id=task.node_id,
        block_count=task.block_count,
        done_block_count=task.done_count,
        failed_block_count=task.failed_count,
        copied_bytes=task.copied_bytes,
        code=task.code if task.over else errors.OK,
        message=task.message if task.over else "",
        age_ms=round(max(0.0, now_s - task.created_s) * 1000),
        tenant=task.tenant,
    )


def tenant_of(named: str, context: CallContext) -> tuple[str, int]:
    """Name and id of the tenant that a call is for: the caller's own, unless an admin names another.

    Raises PermissionDenied when another caller does, InvalidArgument for a malformed name.
    """
    if named and named != context.tenant and not context.admin:
        raise errors.PermissionDenied(f"tenant {context.tenant!r} may not act for tenant {named[:64]!r}")
    tenant = named or context.tenant
    return tenant, tenant_id(tenant)


def fence(term: int, node: Node) -> store_node_pb2.Fence:
    """What a command to a node has to carry; `term` is the one under which it was decided, not the present one."""
    return store_node_pb2.Fence(term=term, incarnation=node.incarnation)
