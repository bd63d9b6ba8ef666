"""What conductor and master answer, as rows of the console's tables, and what they are asked for acts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mooncache.client.results import BlockTier, tier_of_message
from mooncache.gateway.core.console_acts import ActKind, ConsoleAct
from mooncache.gateway.core.console_flows import TenantShare
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS, INSTANCE_ROLES
from mooncache.proto.v1 import common_pb2, conductor_pb2, master_pb2
from mooncache.runtime.enum_words import word_of

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


def instance_counters(views: Iterable[conductor_pb2.InstanceView]) -> dict[str, dict[str, int]]:
    """What each instance has computed and loaded since its engine started."""
    return {
        view.instance.instance_id: {
            "computed_tokens": view.load.prompt_tokens_total,
            "output_tokens": view.load.output_tokens_total,
            "pool_bytes": view.load.pool_hit_tokens_total * view.instance.kv_bytes_per_token,
        }
        for view in views
    }


def node_counters(answer: master_pb2.ListTenantsResponse) -> dict[str, dict[str, int]]:
    """What each node has stored, read and moved since its start, of all tenants together."""
    names = ("stored_bytes", "hit_bytes", "down_bytes", "up_bytes")
    return {
        node.node_id: {name: sum(row.figures.get(name, 0) for row in node.tenants) for name in names}
        for node in answer.nodes
    }


def tenant_shares(answer: master_pb2.ListTenantsResponse) -> list[TenantShare]:
    """What each tenant holds on each node."""
    return [
        TenantShare(node.node_id, row.tenant, row.figures.get("bytes", 0), row.figures.get("disk_bytes", 0))
        for node in answer.nodes
        for row in node.tenants
    ]


def hits_of_unlimited(nodes: Iterable[master_pb2.NodeTenants]) -> float | None:
    """Hits of these nodes over those that they would have with unlimited memory; None: nothing was asked for."""
    rows = list(nodes)
    unlimited = sum(node.sampled_unlimited for node in rows)
    return sum(node.sampled_found for node in rows) / unlimited if unlimited else None


def node_rows(
    status: master_pb2.GetStatusResponse, tenants: master_pb2.ListTenantsResponse | None
) -> list[dict[str, Any]]:
    """A row for each store node. tenants: says what lies on disks and how much is found; None: not known."""
    known = {each.node_id: each for each in (tenants.nodes if tenants is not None else ())}
    return [_node_row(item, known.get(item.node.node_id)) for item in status.nodes]


def _node_row(item: master_pb2.NodeStatus, known: master_pb2.NodeTenants | None) -> dict[str, Any]:
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
    disk_bytes = sum(row.figures.get("disk_bytes", 0) for row in (known.tenants if known is not None else ()))
    if disk_bytes:
        tiers.append({"tier": _DISK, "capacity_bytes": None, "used_bytes": disk_bytes})
    return {
        "id": node.node_id,
        "state": word_of(common_pb2.NodeState, node.state),
        "host": node.host_id,
        "place": ", ".join(f"{name} {value}" for name, value in sorted(node.labels.items())),
        "used_bytes": item.used_bytes,
        "capacity_bytes": node.capacity_bytes,
        "pinned_bytes": item.pinned_bytes,
        "blocks": item.block_count,
        "age_s": item.heartbeat_age_ms / 1e3,
        "tiers": tiers,
        "remark": _remark(item),
        "hits_of_unlimited": hits_of_unlimited([known]) if known is not None else None,
        "version": node.software_version,
    }


def network_view(status: master_pb2.GetStatusResponse) -> dict[str, Any]:
    """The nodes and the ways between them: two places in `nodes`, then microseconds, counts and the age in seconds."""
    nodes = sorted(status.nodes, key=lambda item: item.node.node_id)
    place = {item.node.node_id: at for at, item in enumerate(nodes)}
    return {
        "nodes": [
            {
                "id": item.node.node_id,
                "state": word_of(common_pb2.NodeState, item.node.state),
                "host": item.host_name or item.node.host_id,
            }
            for item in nodes
        ],
        "ways": [
            [
                at,
                place[way.node_id],
                way.median_us,
                way.least_us,
                way.tries,
                way.failures,
                way.age_ms / 1e3,
            ]
            for at, item in enumerate(nodes)
            for way in item.peers
            if way.node_id in place
        ],
    }


_TASK_KINDS: Final = {master_pb2.TASK_KIND_REPLICATE: "copies", master_pb2.TASK_KIND_DRAIN: "drain"}


def task_rows(tasks: Iterable[master_pb2.Task]) -> list[dict[str, Any]]:
    """A row for each task of the master."""
    return [
        {
            "id": task.task_id,
            "kind": _TASK_KINDS.get(task.kind, "unknown"),
            "state": word_of(master_pb2.TaskState, task.state),
            "of": task.node_id or task.tenant,
            "blocks": task.block_count,
            "done": task.done_block_count,
            "failed": task.failed_block_count,
            "bytes": task.copied_bytes,
            "age_s": task.age_ms / 1e3,
            "message": task.message,
        }
        for task in tasks
    ]


def repair_view(found: master_pb2.GetRepairResponse) -> dict[str, Any]:
    """Whether blocks have their copies, how far the repair is, and what moves to emptier nodes. Sizes in bytes."""
    return {
        "state": word_of(master_pb2.RepairState, found.state),
        "short_blocks": found.short_block_count,
        "left_bytes": found.left_bytes,
        "left_s": found.estimate_ms / 1e3 or None,
        "bytes_per_s": found.bytes_per_s,
        "copied_bytes": found.copied_bytes,
        "replicas": found.default_replicas,
        "rebalance": {
            "state": word_of(master_pb2.RebalanceState, found.rebalance.state),
            "left_bytes": found.rebalance.left_bytes,
            "left_s": found.rebalance.estimate_ms / 1e3 or None,
            "bytes_per_s": found.rebalance.bytes_per_s,
            "fullest_percent": found.rebalance.fullest_percent,
            "emptiest_percent": found.rebalance.emptiest_percent,
        },
    }


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


def prefix_rows(prefixes: Iterable[conductor_pb2.HotPrefix]) -> list[dict[str, Any]]:
    """A row for each hot prefix. Names are hexadecimal: a page's numbers have no 64 bits."""
    return [
        {
            "id": f"{prefix.name:x}",
            "parent": f"{prefix.parent:x}" if prefix.parent else None,
            "model": prefix.model,
            "tenant": prefix.pool_tenant,
            "first_block": prefix.first_block,
            "blocks": prefix.block_count,
            "tokens": prefix.tokens,
            "reads": prefix.reads,
            "copies": prefix.copies,
            "hosts": list(prefix.hosts),
        }
        for prefix in prefixes
    ]


def act_request(act: ConsoleAct) -> conductor_pb2.SetInstanceRequest | master_pb2.DrainNodeRequest:
    """The call that does an act on an instance or a node: at the conductor for instances, at the master for nodes."""
    match act.kind:
        case ActKind.DRAIN_NODE:
            return master_pb2.DrainNodeRequest(node_id=act.name, move_blocks=True)
        case ActKind.UNDRAIN_NODE:
            return master_pb2.DrainNodeRequest(node_id=act.name, cancel=True)
        case ActKind.SET_ROLE:
            assert act.role is not None
            number = INSTANCE_ROLE_NUMBERS[act.role]
            return conductor_pb2.SetInstanceRequest(instance_id=act.name, role=number)
        case ActKind.DRAIN_INSTANCE | ActKind.UNDRAIN_INSTANCE:
            drain = act.kind is ActKind.DRAIN_INSTANCE
            return conductor_pb2.SetInstanceRequest(instance_id=act.name, drain=drain)
        case _:
            raise ValueError(f"{act.kind} is an act on a prefix")
