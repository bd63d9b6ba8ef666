"""What conductor and master answer, as rows of the console's tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mooncache.client.results import BlockTier, tier_of_message
from mooncache.kvcache.instance_messages import INSTANCE_ROLES
from mooncache.proto.v1 import common_pb2, conductor_pb2, master_pb2

_INSTANCE_STATES: Final = {
    conductor_pb2.INSTANCE_STATE_STARTING: "starting",
    conductor_pb2.INSTANCE_STATE_READY: "ready",
    conductor_pb2.INSTANCE_STATE_DRAINING: "draining",
    conductor_pb2.INSTANCE_STATE_SUSPECT: "suspect",
}
_DISK: Final = "disk"


def instance_rows(views: Iterable[conductor_pb2.InstanceView]) -> list[dict[str, Any]]:
    """A row for each instance."""
    return [_instance_row(view) for view in views]


def _instance_row(view: conductor_pb2.InstanceView) -> dict[str, Any]:
    instance, load = view.instance, view.load
    hits = load.local_hit_tokens_total + load.pool_hit_tokens_total
    prompt = hits + load.prompt_tokens_total
    return {
        "id": instance.instance_id,
        "role": INSTANCE_ROLES.get(instance.role, "unknown"),
        "state": _INSTANCE_STATES.get(instance.state, "unknown"),
        "reason": view.reason or view.apart,
        "model": instance.model,
        "engine": f"{instance.engine} {instance.engine_version}".strip(),
        "running": load.running,
        "waiting": load.waiting,
        "assigned": view.assigned,
        "kv_share": load.kv_usage,
        "hit_share": hits / prompt if prompt else None,
        "ttft_ms": load.ttft_ms or None,
        "tbt_ms": load.tbt_ms or None,
        "blocks": view.cached_blocks,
        "age_s": view.report_age_ms / 1e3,
    }


def node_rows(
    status: master_pb2.GetStatusResponse, tenants: master_pb2.ListTenantsResponse | None
) -> list[dict[str, Any]]:
    """A row for each store node. tenants: says what lies on disks; None: not known."""
    disks: dict[str, int] = {}
    for each in tenants.nodes if tenants is not None else ():
        disks[each.node_id] = sum(row.figures.get("disk_bytes", 0) for row in each.tenants)
    return [_node_row(item, disks.get(item.node.node_id)) for item in status.nodes]


def _node_row(item: master_pb2.NodeStatus, disk_bytes: int | None) -> dict[str, Any]:
    node = item.node
    capacity: dict[str, int] = {}
    for segment in node.segments:
        tier = str(tier_of_message(segment.tier))
        capacity[tier] = capacity.get(tier, 0) + segment.capacity_bytes
    if not capacity and node.capacity_bytes:  # a node of a version that does not name its segments
        capacity[str(BlockTier.DRAM)] = node.capacity_bytes
    # A node says what is used of all its memory together. With one tier of memory that is the tier's.
    single = len(capacity) == 1
    tiers = [
        {"tier": tier, "capacity_bytes": size, "used_bytes": item.used_bytes if single else None}
        for tier, size in sorted(capacity.items())
    ]
    if disk_bytes:
        tiers.append({"tier": _DISK, "capacity_bytes": None, "used_bytes": disk_bytes})
    return {
        "id": node.node_id,
        "state": _node_state(node.state),
        "host": node.host_id,
        "place": ", ".join(f"{name} {value}" for name, value in sorted(node.labels.items())),
        "used_bytes": item.used_bytes,
        "capacity_bytes": node.capacity_bytes,
        "pinned_bytes": item.pinned_bytes,
        "blocks": item.block_count,
        "age_s": item.heartbeat_age_ms / 1e3,
        "tiers": tiers,
        "remark": _remark(item),
        "version": node.software_version,
    }


def _node_state(number: int) -> str:
    known = number in common_pb2.NodeState.values()
    return common_pb2.NodeState.Name(number).removeprefix("NODE_STATE_").lower() if known else "unknown"


def _remark(item: master_pb2.NodeStatus) -> str:
    if item.arena_gone:
        return "the memory of its blocks does not answer"
    return "the directory waits for its full report" if item.full_report_pending else ""


def conductor_view(answer: conductor_pb2.GetConductorStatusResponse) -> dict[str, Any]:
    """How the conductor decides, and what it counts since its start."""
    refused = {name: count for name, count in sorted(answer.decisions.items()) if name != "admitted"}
    return {
        "version": answer.software_version,
        "uptime_s": answer.uptime_ms / 1e3,
        "policy": answer.policy,
        "admission": answer.admission,
        "pool_connected": answer.pool_connected,
        "active": answer.active_request_count,
        "admitted": answer.decisions.get("admitted", 0),
        "refused": refused,
        "gateways": len(answer.gateways),
    }
