"""Gathers the facts: everything is asked at once, each part within its time, and the whole within `BUDGET_S`.

A part that does not answer leaves its reason in the facts and holds nothing else up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from mooncache.cli.common import Where
from mooncache.cli.doctor.ask_nodes import ask_nodes
from mooncache.cli.doctor.ask_serving import ask_agreement, ask_decisions, ask_instances, engine_logs
from mooncache.cli.doctor.core.facts import (
    BlockProbe,
    ClockOffset,
    Facts,
    MemberFacts,
    NodeFacts,
    PoolFacts,
    ServingFacts,
    TenantUse,
)
from mooncache.cli.doctor.probe import count_saved, probe_nodes
from mooncache.cli.member_rows import hosts_of
from mooncache.cli.repair import repair_document
from mooncache.cli.snapshot import ClusterPoller, ClusterSnapshot, part_problems
from mooncache.client.options import ClientOptions
from mooncache.client.state_dir import read_cluster_file
from mooncache.conductor.core.members import MemberKind
from mooncache.config import Config, is_set, load
from mooncache.errors import MooncacheError, PermissionDenied, Unauthenticated
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.runtime.enum_words import word_of
from mooncache.store_node.host_memory import memory_left_bytes
from mooncache.store_node.native_settings import quarter_of_memory_bytes
from mooncache.topology.core.host_facts import ArenaFacts, HostFacts
from mooncache.topology.examine import examine
from mooncache.worker.adapters.vllm import why_refused

BUDGET_S: Final = 10.0
_POLL_S: Final = 3.0
_PART_S: Final = 5.0

Tell = Callable[[str, bool], None]
"""Called with the name of a part, and whether it has ended."""
T = TypeVar("T")


async def gather(where: Where, tell: Tell) -> Facts:
    """All facts. Raises nothing of the catalogue: what goes wrong is a fact."""
    deadline_s = time.monotonic() + min(BUDGET_S, where.timeout_s)
    try:
        config = load(
            overrides={"cluster.state_dir": where.state_dir, "cluster.token_file": where.token_file}
        )
    except MooncacheError as error:
        config = Config()
        return await _without_cluster(config, str(error.message), tell)
    try:
        known = where.master is not None or is_set(config, "cluster.master_targets")
        known = known or read_cluster_file(config.cluster.state_dir) is not None
        if not known:
            return await _without_cluster(config, "", tell)
        poller = ClusterPoller(dataclasses.replace(where, timeout=f"{_POLL_S:g}s"))
    except MooncacheError as error:
        return await _without_cluster(config, error.message, tell)
    try:
        return await _of_cluster(where, config, poller, deadline_s, tell)
    finally:
        await poller.close()


async def _without_cluster(config: Config, problem: str, tell: Tell) -> Facts:
    tell("this host", False)
    here = await asyncio.to_thread(_here, config)
    tell("this host", True)
    return Facts(
        here=here,
        token_error=problem,
        busy_ports={} if problem else busy_ports(config),
        engine_problem=_engine_problem(config),
        uses_vllm=config.worker.engine == "vllm",
        now_s=time.time(),
    )


def _engine_problem(config: Config) -> str:
    return why_refused(config) if config.worker.engine == "vllm" else ""


def _here(config: Config) -> HostFacts:
    """This host, with the memory and the disks that a node with these settings would take."""
    node = config.store_node
    size = node.capacity_bytes or (0 if node.arena_path or node.arena_device else quarter_of_memory_bytes())
    kind = "gpu" if node.arena_device else "file" if node.arena_path else "memory"
    paths = node.ssd_paths or (str(config.cluster.state_dir),)
    return examine(
        config,
        arena=ArenaFacts(size, kind, numa_node=node.numa_node),
        ssd_paths=[str(Path(path).expanduser()) for path in paths] if node.ssd_bytes else (),
        memory_left_bytes=memory_left_bytes(),
    )


def busy_ports(config: Config) -> dict[str, int]:
    """Ports of the settings that cannot be opened here now."""
    wanted = {
        "gateway.port": (config.gateway.host, config.gateway.port),
        "conductor.port": (config.conductor.host, config.conductor.port),
        "master.port": (config.master.host, config.master.port),
        "store_node.port": (config.store_node.host, config.store_node.port),
        "store_node.data_port": (config.store_node.data_host, config.store_node.data_port),
    }
    return {name: port for name, (host, port) in wanted.items() if port and not _can_open(host, port)}


def _can_open(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


class _Parts:
    """Runs the parts at the same time; what a part had found counts, its errors are returned as sentences."""

    def __init__(self, deadline_s: float, tell: Tell) -> None:
        self._deadline_s, self._tell = deadline_s, tell

    @property
    def left_s(self) -> float:
        return max(0.1, self._deadline_s - time.monotonic())

    async def run(self, name: str, part: Coroutine[Any, Any, T], otherwise: T) -> tuple[T, str]:
        """What the part returns and ""; or `otherwise` and why."""
        self._tell(name, False)
        try:
            async with asyncio.timeout(self.left_s):
                return await part, ""
        except TimeoutError:
            return otherwise, "it did not answer in time"
        except MooncacheError as error:
            return otherwise, error.message
        finally:
            self._tell(name, True)


async def _of_cluster(
    where: Where, config: Config, poller: ClusterPoller, deadline_s: float, tell: Tell
) -> Facts:
    parts = _Parts(deadline_s, tell)
    looking = asyncio.create_task(parts.run("this host", asyncio.to_thread(_here, config), None))
    snapshot, _ = await parts.run(
        "master and conductor",
        poller.poll(with_metrics=False, with_latencies=True),
        ClusterSnapshot(time.monotonic()),
    )
    options = ClientOptions.gather(**where.settings())
    asked_nodes = parts.run(
        "store nodes", ask_nodes(options, _nodes_of(snapshot), min(_PART_S, parts.left_s)), ()
    )
    pool_calls = _ask_master(poller, snapshot)
    (nodes, nodes_problem), (asked, _), (serving, _) = await asyncio.gather(
        asked_nodes,
        parts.run("tenants and copies", pool_calls, (None, None)),
        parts.run("engines", _serving(where, config, poller, snapshot, parts), ServingFacts()),
    )
    listed = nodes or tuple(dataclasses.replace(node, error=nodes_problem) for node in _plain_nodes(snapshot))
    listed, serving = await _with_blocks(where, listed, serving, parts)
    here, _ = await looking
    return Facts(
        here=here if here is not None else await asyncio.to_thread(_here, config),
        pool=_pool(snapshot, listed, *asked),
        serving=serving,
        members=_members(snapshot),
        members_error=snapshot.members_error or snapshot.pool_reason,
        parts=tuple(_part_problem(text) for text in part_problems(snapshot.parts)),
        engine_problem=_engine_problem(config),
        uses_vllm=config.worker.engine == "vllm" and bool(poller.conductor_target),
        now_s=time.time(),
    )


def _members(snapshot: ClusterSnapshot) -> tuple[MemberFacts, ...] | None:
    if snapshot.members is None:
        return None
    hosts, ours = hosts_of(snapshot.members), snapshot.conductor_clock
    found = []
    for row in snapshot.members:
        clock = None
        if row["clock_bound_s"] is not None and ours is not None:
            offset_s = row["clock_offset_s"] - ours.offset_ms / 1e3
            clock = ClockOffset(offset_s, row["clock_bound_s"] + ours.bound_ms / 1e3)
        master = snapshot.master_clock
        answered = snapshot.status.master_id if snapshot.status is not None else ""
        if master is not None and row["kind"] == MemberKind.MASTER and row["name"] == answered:
            clock = ClockOffset(-master.offset_ms / 1e3, master.bound_ms / 1e3)
        found.append(
            MemberFacts(
                row["kind"],
                row["name"],
                hosts[row["host_id"]],
                row["state"],
                row["software_version"],
                row["heard_age_s"],
                clock,
            )
        )
    return tuple(found)


def _part_problem(text: str) -> tuple[str, str]:
    """The name of a part, and what its supervisor says of it."""
    name, _, rest = text.partition(": ")
    return (
        (name, rest) if rest and " " not in name else (text.split(" ", maxsplit=1)[0], text.partition(" ")[2])
    )


def _nodes_of(snapshot: ClusterSnapshot) -> list[common_pb2.NodeInfo]:
    found = [item.node for item in snapshot.status.nodes] if snapshot.status is not None else []
    return sorted(found, key=lambda node: node.node_id)


def _plain_nodes(snapshot: ClusterSnapshot) -> tuple[NodeFacts, ...]:
    return tuple(NodeFacts(node.node_id, target=node.endpoints.grpc_target) for node in _nodes_of(snapshot))


def _pool(
    snapshot: ClusterSnapshot,
    nodes: tuple[NodeFacts, ...],
    tenants: dict[str, TenantUse] | None,
    repair: dict[str, Any] | None,
) -> PoolFacts:
    status, error = snapshot.status, snapshot.master_error
    if status is None:
        text = error.message if error is not None else "it did not answer in time"
        return PoolFacts(error=text, refused=isinstance(error, Unauthenticated | PermissionDenied))
    by_name = {node.node_id: node for node in nodes}
    listed = []
    for item in sorted(status.nodes, key=lambda each: each.node.node_id):
        node = by_name.get(item.node.node_id, NodeFacts(item.node.node_id))
        listed.append(
            dataclasses.replace(
                node,
                host_id=item.node.host_id,
                target=item.node.endpoints.grpc_target,
                data=f"{item.node.endpoints.tcp_host}:{item.node.endpoints.tcp_port}",
                state=word_of(common_pb2.NodeState, item.node.state),
                version=item.node.software_version,
                capacity_bytes=item.node.capacity_bytes,
                used_bytes=item.used_bytes,
                pinned_bytes=item.pinned_bytes,
                heartbeat_age_s=item.heartbeat_age_ms / 1e3,
                arena_gone=item.arena_gone,
                offers_rdma=any(rail.up for rail in item.node.rails),
                latencies_ms={way.node_id: way.median_us / 1e3 for way in item.peers if way.tries},
            )
        )
    return PoolFacts(
        master_id=status.master_id,
        version=status.software_version,
        directory_complete=status.directory_complete,
        masters=max(1, len(status.masters)),
        nodes=tuple(listed),
        tenants=tenants,
        repair=repair,
    )


async def _ask_master(
    poller: ClusterPoller, snapshot: ClusterSnapshot
) -> tuple[dict[str, TenantUse] | None, dict[str, Any] | None]:
    if snapshot.status is None:
        return None, None
    tenants: dict[str, TenantUse] | None = None
    repair: dict[str, Any] | None = None
    with contextlib.suppress(MooncacheError):  # a tenant's token may not ask
        found = await poller.ask_master(
            "ListTenants", master_pb2.ListTenantsRequest(), master_pb2.ListTenantsResponse
        )
        tenants = _tenants(found)
    with contextlib.suppress(MooncacheError):
        answer = await poller.ask_master(
            "GetRepair", master_pb2.GetRepairRequest(), master_pb2.GetRepairResponse
        )
        repair = repair_document(answer)
    return tenants, repair


def _tenants(found: master_pb2.ListTenantsResponse) -> dict[str, TenantUse]:
    limits = {one.tenant: one for one in found.table.tenants}
    sums: dict[str, dict[str, int]] = {name: {} for name in limits}
    for node in found.nodes:
        for row in node.tenants:
            mine = sums.setdefault(row.tenant or "(others)", {})
            for key in ("bytes", "hits", "misses"):
                mine[key] = mine.get(key, 0) + row.figures.get(key, 0)
    none = common_pb2.TenantLimits()
    return {
        name: TenantUse(
            mine.get("bytes", 0),
            mine.get("hits", 0),
            mine.get("misses", 0),
            limits.get(name, none).memory_share_bytes,
            limits.get(name, none).memory_quota_bytes,
        )
        for name, mine in sums.items()
    }


async def _serving(
    where: Where, config: Config, poller: ClusterPoller, snapshot: ClusterSnapshot, parts: _Parts
) -> ServingFacts:
    found = ServingFacts(
        conductor_target=poller.conductor_target,
        conductor_error=snapshot.conductor_error,
        conductor=snapshot.conductor or {},
        gateway_url=poller.gateway_url,
        gateway_reason=snapshot.gateway_reason or "",
        instances=tuple(snapshot.instances or ()),
    )
    if not found.conductor_target or found.conductor_error or not snapshot.instances:
        return found
    local = poller.cluster is not None and where.master is None
    unwell = [str(row["instance_id"]) for row in found.instances if row["state"] != "ready"]
    logs = engine_logs(config.cluster.state_dir, unwell) if local else {}
    (instances, _), (decisions, _), (agreement, problem) = await asyncio.gather(
        parts.run("passports", ask_instances(where, found.instances), found.instances),
        parts.run("decisions", ask_decisions(where), ()),
        parts.run("hash agreement", ask_agreement(where, config, found, min(_PART_S, parts.left_s)), None),
    )
    return dataclasses.replace(
        found,
        instances=instances,
        decisions=decisions,
        agreement=agreement,
        agreement_error=problem,
        engine_logs=logs,
    )


async def _with_blocks(
    where: Where, nodes: tuple[NodeFacts, ...], serving: ServingFacts, parts: _Parts
) -> tuple[tuple[NodeFacts, ...], ServingFacts]:
    """The same with what came of the probe blocks, and of the blocks that engines saved."""
    active = [node.node_id for node in nodes if node.state == "active"]
    if not active:
        return nodes, serving
    saves = {str(row["instance_id"]) for row in serving.instances if row["pool"]}
    keys = {
        str(one["instance_id"]): [bytes.fromhex(key) for key in one["keys"]]
        for model in serving.agreement or ()
        for one in model["instances"]
        if one["keys"] and one["instance_id"] in saves
    }
    timeout_s = max(0.5, min(_PART_S, parts.left_s) - 0.5)
    (probes, saved), problem = await parts.run(
        "probe blocks", asyncio.to_thread(_blocks, where, active, keys, timeout_s), ({}, {})
    )
    nodes = tuple(
        dataclasses.replace(node, probe=probes.get(node.node_id, BlockProbe(problem or "no answer in time")))
        if node.node_id in active
        else node
        for node in nodes
    )
    if serving.agreement is None:
        return nodes, serving
    models = tuple(
        {
            **model,
            "instances": [{**one, "saved": saved.get(one["instance_id"])} for one in model["instances"]],
        }
        for model in serving.agreement
    )
    return nodes, dataclasses.replace(serving, agreement=models)


def _blocks(
    where: Where, nodes: list[str], keys: dict[str, list[bytes]], timeout_s: float
) -> tuple[dict[str, Any], dict[str, int]]:
    with dataclasses.replace(where, timeout=f"{timeout_s:g}s").connect() as client:
        saved = count_saved(client, keys, min(2.0, timeout_s), threading.Event()) if keys else {}
        return probe_nodes(client, nodes, timeout_s), saved
