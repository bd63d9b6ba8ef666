"""Commands for the whole cluster: status, drain."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.cli.conductor_view import conductor_lines
from mooncache.client.master_link import MasterLink
from mooncache.client.results import tier_of_message
from mooncache.conductor.core.registry import InstanceState
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.reporting.output import (
    EXIT_MISS,
    EXIT_OK,
    console,
    exit_code_of,
    human_age,
    human_bytes,
    print_json,
    print_table,
)
from mooncache.runtime.enum_words import word_of
from mooncache.topology import machine
from mooncache.topology.core import choose

if TYPE_CHECKING:
    from mooncache.cli.snapshot import ClusterSnapshot
    from mooncache.client.state_dir import ClusterFile

_POLL_S = 0.2
_TASK_OVER = {master_pb2.TASK_STATE_DONE, master_pb2.TASK_STATE_FAILED, master_pb2.TASK_STATE_CANCELLED}
_EPOCH_MASK = (1 << 20) - 1
"""The lower bits of a map's epoch count the maps of one term; the bits above are the term."""
_TERM_AGE_MAX_S = 10 * 365 * 86_400.0


def _node_row(item: master_pb2.NodeStatus) -> dict[str, object]:
    node = item.node
    return {
        "node_id": node.node_id,
        "index": node.index,
        "state": word_of(common_pb2.NodeState, node.state),
        "host_id": node.host_id,
        "grpc_target": node.endpoints.grpc_target,
        "tcp": f"{node.endpoints.tcp_host}:{node.endpoints.tcp_port}",
        "unix_path": node.endpoints.unix_path,
        "arena_gone": item.arena_gone,
        "arena": ", ".join(sorted({segment.kind or "memory" for segment in node.segments})),
        "tier": ", ".join(sorted({tier_of_message(segment.tier) for segment in node.segments})),
        "capacity_bytes": node.capacity_bytes,
        "used_bytes": item.used_bytes,
        "free_bytes": node.free_bytes,
        "pinned_bytes": item.pinned_bytes,
        "block_count": item.block_count,
        "directory_block_count": item.directory_block_count,
        "weight": node.weight,
        "heartbeat_age_s": item.heartbeat_age_ms / 1000.0,
        "full_report_pending": item.full_report_pending,
        "software_version": node.software_version,
        "labels": dict(sorted(node.labels.items())),
        "peers": [
            {
                "node_id": way.node_id,
                "median_ms": way.median_us / 1e3 if way.tries else None,
                "least_ms": way.least_us / 1e3 if way.tries else None,
                "tries": way.tries,
                "failures": way.failures,
                "age_s": way.age_ms / 1e3,
            }
            for way in item.peers
        ],
        "rails": [
            {
                "device": f"{rail.device}:{rail.port}",
                "address": rail.address,
                "link_layer": rail.link_layer,
                "numa_node": rail.numa_node if rail.numa_node >= 0 else None,
                "gbit_per_s": rail.megabits_per_s / 1000.0,
                "mtu_bytes": rail.mtu_bytes,
                "up": rail.up,
                "connections": rail.connections,
                "grants": rail.grants,
                "granted_bytes": rail.granted_bytes,
            }
            for rail in node.rails
        ],
    }


def status_document(response: master_pb2.GetStatusResponse) -> dict[str, Any]:
    """GetStatusResponse as a plain document."""
    return {
        "master": {
            "master_id": response.master_id,
            "leading": response.leading,
            "term": response.term,
            "epoch": response.epoch,
            "map": response.epoch & _EPOCH_MASK,
            "uptime_s": response.uptime_ms / 1000.0,
            "software_version": response.software_version,
            "block_count": response.block_count,
            "directory_memory_bytes": response.directory_memory_bytes,
            "directory_complete": response.directory_complete,
            "active_task_count": response.active_task_count,
        },
        "masters": [
            {"master_id": m.master_id, "grpc_target": m.grpc_target, "leader": m.leader}
            for m in response.masters
        ],
        "nodes": [_node_row(item) for item in response.nodes],
    }


def status(*, where: Where = HERE, json: AsJson = False) -> int:
    """Show what serves (conductor, engines), the pool (master, store nodes), and every process, host by host.

    It shows the whole cluster from any host that knows the conductor and the master: one that joined, or one with
    --conductor and --master, or cluster.conductor_target and cluster.master_targets.

    For example:

        mooncache status

        mooncache status --json | jq '.nodes[].used_bytes'
    """
    import asyncio

    from mooncache.cli.snapshot import ClusterPoller, part_problems
    from mooncache.errors import MasterUnavailable

    async def once() -> tuple[ClusterSnapshot, ClusterPoller]:
        poller = ClusterPoller(where)
        try:
            return await poller.poll(with_metrics=False, with_latencies=True), poller
        finally:
            await poller.close()

    snapshot, poller = asyncio.run(once())
    gateway_url, conductor_target = poller.gateway_url, poller.conductor_target
    master_error = snapshot.master_error or MasterUnavailable("The master did not answer.")
    silent = snapshot.conductor is None and not snapshot.parts
    if snapshot.status is None and (
        silent or not master_error.retryable
    ):  # a wrong token is wrong everywhere
        raise master_error
    document = (
        status_document(snapshot.status) if snapshot.status is not None else {"master": None, "nodes": []}
    )
    document["parts"] = [asdict(part) for part in snapshot.parts]
    document |= _members_of(snapshot, poller.cluster, poller.host_id)
    if snapshot.status is None:
        document["master_error"] = master_error.message
    if any(node["rails"] for node in document["nodes"]):
        document["no_rdma_here"] = choose.why_none(machine.look())
    if conductor_target:
        document["serving"] = {
            "gateway": {"url": gateway_url, "reason": snapshot.gateway_reason} if gateway_url else None,
            "conductor": {
                "target": conductor_target,
                "reason": snapshot.conductor_error,
                **(snapshot.conductor or {}),
            },
            "instances": snapshot.instances or [],
        }
    if json:
        print_json(document)
    else:
        if conductor_target:
            _show_serving(document["serving"], listed=snapshot.members is not None)
        if snapshot.status is not None:
            _show_pool(document)
        else:
            console.print(f"master    {master_error.message}", style="red", markup=False, soft_wrap=True)
        _show_members(document, poller.host_id)
        for line in part_problems(snapshot.parts):
            console.print(line, style="yellow", markup=False, soft_wrap=True)
    return EXIT_OK if snapshot.status is not None else exit_code_of(master_error.code)


def _members_of(snapshot: ClusterSnapshot, cluster: ClusterFile | None, own: str) -> dict[str, Any]:
    """Every process that is known, and a sentence where some may be missing."""
    from mooncache.cli.member_rows import pool_rows, with_local_facts

    if snapshot.members is not None:
        stale = "the conductor knows nothing new of masters and store nodes: " + snapshot.pool_reason
        return {"members": snapshot.members, "members_error": stale if snapshot.pool_reason else ""}
    rows = with_local_facts(pool_rows(snapshot.status), cluster, own) if snapshot.status is not None else []
    missing = f"gateways, conductors and workers are not listed: {snapshot.members_error}"
    return {"members": rows, "members_error": missing}


def _show_members(document: dict[str, Any], own_host_id: str) -> None:
    from mooncache.cli.member_rows import show_members

    if document["members"]:
        console.print()
        show_members(document["members"], own_host_id)
    if document["members_error"] and (document.get("serving") or not document["members"]):
        console.print(document["members_error"], style="yellow", markup=False, soft_wrap=True)


def _show_serving(serving: dict[str, Any], *, listed: bool) -> None:
    """listed: the gateways follow in the list of processes."""
    gateway, conductor = serving["gateway"], serving["conductor"]
    if gateway is not None:
        console.print(f"gateway   [bold]{gateway['url']}/v1[/] ", end="")
        _say_ready(gateway["reason"])
    for other in () if listed else conductor.get("gateways", ()):
        if gateway is None or other["url"] != gateway["url"]:
            state = (
                "is draining"
                if other["draining"]
                else f"last asked the conductor {human_age(other['heard_age_s'])} ago"
            )
            console.print(
                f"gateway   {other['url']}/v1 ({other['gateway_id']}) {state}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    console.print(f"conductor {conductor['target']} ", end="")
    _say_ready(conductor["reason"])
    if "policy" in conductor:
        for line in conductor_lines(conductor):
            console.print(f"          {line}", style="dim", markup=False, highlight=False)
    rows = [
        (
            row["instance_id"],
            row["role"],
            row["state"],
            row["engine"],
            row["model"],
            f"{row['running']}+{row['waiting']}",
            f"{row['kv_usage']:.0%}",
            row["cached_blocks"],
            row["url"].removeprefix("http://"),
        )
        for row in serving["instances"]
    ]
    columns = ("instance", "role", "state", "engine", "model", "load*", "KV used", "blocks", "http")
    print_table("", columns, rows)
    for row in serving["instances"]:
        if row["state"] != InstanceState.READY and row["reason"]:
            console.print(
                f"{row['instance_id']} is {row['state']}: {row['reason']}", style="yellow", markup=False
            )
        elif not row["pool"]:
            console.print(f"{row['instance_id']} does not use the pool", style="yellow", markup=False)
        if row["apart"]:
            console.print(f"{row['instance_id']} {row['apart']}", style="yellow", markup=False)
    if not rows:
        console.print("no engines", style="yellow")
    console.print()


def _say_ready(reason: str | None) -> None:
    if reason:
        console.print(reason, style="yellow", markup=False)
    else:
        console.print("ready" if reason is not None else "", style="green")


def _show_pool(document: dict[str, Any]) -> None:
    master = document["master"]
    role = "leading" if master["leading"] else "standby"
    whole = "" if master["directory_complete"] else ", directory is being rebuilt"
    console.print(
        f"master    [bold]{master['master_id']}[/] {role}{_since(master['term'])}, map {master['map']}, "
        f"up {human_age(master['uptime_s'])}, {master['block_count']} blocks in the directory{whole}"
    )
    print_table(
        "",
        ("node", "state", "arena", "tier", "blocks", "used", "free", "data port", "heartbeat age"),
        [
            (
                node["node_id"],
                node["state"],
                f"{node['arena']} (gone)" if node["arena_gone"] else node["arena"],
                node["tier"],
                node["block_count"],
                human_bytes(node["used_bytes"]),
                human_bytes(node["free_bytes"]),
                node["tcp"],
                human_age(node["heartbeat_age_s"]),
            )
            for node in document["nodes"]
        ],
    )
    for node in document["nodes"]:
        if node["labels"]:
            labels = " ".join(f"{name}={value}" for name, value in node["labels"].items())
            console.print(f"{node['node_id']}: {labels}", style="dim", markup=False, highlight=False)
    rails = [
        (
            node["node_id"],
            rail["device"],
            "up" if rail["up"] else "down",
            f"{rail['link_layer']} {rail['address']}",
            f"{rail['gbit_per_s']:g} Gbit/s",
            "" if rail["numa_node"] is None else rail["numa_node"],
            rail["connections"],
            human_bytes(rail["granted_bytes"]),
        )
        for node in document["nodes"]
        for rail in node["rails"]
    ]
    if rails:
        print_table(
            "", ("node", "rail", "state", "address", "speed", "NUMA", "connections", "granted"), rails
        )
    if reason := document.get("no_rdma_here", ""):
        console.print(f"this host does not use RDMA: {reason}", style="yellow", markup=False)
    if not document["nodes"]:
        console.print("no store nodes; start one with `mooncache store-node`", style="yellow")


def _since(term: int) -> str:
    """A term is a number that only grows; where it is a time in milliseconds, it says since when the master leads."""
    seconds = term / 1000.0
    if abs(time.time() - seconds) > _TERM_AGE_MAX_S:
        return f", term {term}" if term else ""
    return time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(seconds))


def drain(
    node_id: Annotated[str, Parameter(help="Name of the node, as `mooncache status` shows it.")],
    /,
    *,
    cancel: Annotated[
        bool, Parameter(negative=(), help="Cancel a drain; the node takes new blocks again.")
    ] = False,
    no_move: Annotated[bool, Parameter(negative=(), help="Do not copy blocks to other nodes.")] = False,
    no_wait: Annotated[bool, Parameter(negative=(), help="Return at once; the drain continues.")] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Empty a node before it leaves: it takes no new blocks, and blocks that only it holds are copied to other nodes.

    For example:

        mooncache drain node-2 --timeout 10min

        mooncache drain node-2 --cancel
    """

    async def ask(link: MasterLink) -> tuple[str, master_pb2.Task | None]:
        deadline_s = time.monotonic() + where.timeout_s
        request = master_pb2.DrainNodeRequest(node_id=node_id, cancel=cancel, move_blocks=not no_move)
        response = await link.call(
            "DrainNode", request, master_pb2.DrainNodeResponse, where.timeout_s, attempt_s=5.0
        )
        if cancel or no_wait or not response.task_id:
            return response.task_id, None
        return response.task_id, await _follow(link, response.task_id, deadline_s, quiet=json)

    task_id, task = where.ask_master(ask)
    state = "cancelled" if cancel else "started"
    if task is not None:
        state = word_of(master_pb2.TaskState, task.state)
    if json:
        document: dict[str, Any] = {"node_id": node_id, "task_id": task_id, "state": state}
        if task is not None:
            document |= {
                "block_count": task.block_count,
                "done_block_count": task.done_block_count,
                "failed_block_count": task.failed_block_count,
                "copied_bytes": task.copied_bytes,
                "code": task.code,
                "message": task.message,
            }
        print_json(document)
    elif cancel:
        console.print(f"{node_id} takes new blocks again")
    elif task is None:
        console.print(f"drain of {node_id} started, task {task_id}")
    else:
        console.print(
            f"drain of {node_id}: {state}, {task.done_block_count} of {task.block_count} blocks, "
            f"{human_bytes(task.copied_bytes)} copied"
        )
        if task.message:
            console.print(task.message, markup=False)
    return EXIT_MISS if task is not None and task.state == master_pb2.TASK_STATE_FAILED else EXIT_OK


def drain_text(task: master_pb2.Task, passed_s: float) -> str:
    """How far a drain is; what is left is estimated from the blocks that are done."""
    text = f"draining: {task.done_block_count} of {task.block_count} blocks, {human_bytes(task.copied_bytes)} copied"
    left = task.block_count - task.done_block_count - task.failed_block_count
    if not task.done_block_count or left <= 0 or passed_s <= 0:
        return text
    share = left / task.done_block_count
    rate = task.copied_bytes / passed_s
    return (
        f"{text}, about {human_bytes(task.copied_bytes * share)} left at {human_bytes(rate)}/s, "
        f"{human_age(passed_s * share)}"
    )


async def _follow(link: MasterLink, task_id: str, deadline_s: float, *, quiet: bool) -> master_pb2.Task:
    """Poll a task until it is over or the time is; a task that outlives the time limit goes on at the master."""
    from mooncache.errors import DeadlineExceeded
    from mooncache.runtime.clock import SystemClock

    clock = SystemClock()
    began_s = time.monotonic()
    with (Console(quiet=True) if quiet else console).status("draining…") as shown:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"The drain is still running (task {task_id}); the master continues it."
                )
            response = await link.call(
                "GetTask",
                master_pb2.GetTaskRequest(task_id=task_id),
                master_pb2.GetTaskResponse,
                left_s,
                attempt_s=5.0,
            )
            task = response.task
            if task.state in _TASK_OVER:
                return task
            shown.update(drain_text(task, time.monotonic() - began_s))
            await clock.sleep(_POLL_S)
