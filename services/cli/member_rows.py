"""The cluster's processes for people and programs: rows of the conductor's list, and how they look."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mooncache.client.members import members_of_pool
from mooncache.client.state_dir import ClusterFile
from mooncache.conductor.core.members import MemberKind, Presence
from mooncache.proto.v1 import conductor_pb2, master_pb2
from mooncache.reporting.output import console, human_age, print_table

WELL: Final = frozenset({"ready", "leader", "standby"})


def member_rows(answer: conductor_pb2.ListMembersResponse) -> list[dict[str, Any]]:
    """ListMembers as plain rows."""
    from mooncache.conductor.member_messages import PRESENCES  # it needs numpy, which not every host has

    return [
        _row(view.member, PRESENCES.get(view.presence, Presence.SILENT), view.heard_age_ms / 1e3)
        for view in answer.members
    ]


def pool_rows(status: master_pb2.GetStatusResponse) -> list[dict[str, Any]]:
    """The same of what a master knows: masters and store nodes alone."""
    return [
        _row(member, Presence.SILENT if member.state in ("suspect", "dead") else Presence.PRESENT, age_s)
        for member, age_s in members_of_pool(status)
    ]


def _row(member: conductor_pb2.Member, presence: Presence, heard_age_s: float) -> dict[str, Any]:
    from mooncache.conductor.member_messages import KINDS

    compared = member.HasField("clock_bound_ms")
    return {
        "kind": str(KINDS.get(member.kind, "unknown")),
        "name": member.name,
        "host_id": member.host_id,
        "host_name": member.host_name,
        "address": member.address,
        "software_version": member.software_version,
        "state": member.state if presence is Presence.PRESENT else str(presence),
        "last_state": member.state,
        "reason": member.reason,
        "started_s": member.started_ms / 1e3 if member.started_ms else None,
        "heard_age_s": heard_age_s,
        "pid": member.pid,
        "clock_offset_s": member.clock_offset_ms / 1e3 if compared else None,
        "clock_bound_s": member.clock_bound_ms / 1e3 if compared else None,
        "here": None,
    }


def with_local_facts(
    rows: Iterable[Mapping[str, Any]], cluster: ClusterFile | None, own_host_id: str
) -> list[dict[str, Any]]:
    """The rows, each process of this machine's `mooncache up` with what its supervisor says of it."""
    parts = {part.pid: part for part in cluster.parts} if cluster is not None else {}
    found = []
    for row in rows:
        part = parts.get(row["pid"]) if row["pid"] and row["host_id"] == own_host_id else None
        local = None
        if part is not None:
            local = {"part": part.name, "pid": part.pid, "state": part.state, "restarts": part.restarts}
        found.append({**row, "here": local})
    return found


def hosts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to call each host, by its id: its name, with a part of the id where several hosts have that name."""
    names: dict[str, str] = {}
    for row in rows:
        name = row["host_name"] or names.get(row["host_id"], "")
        names[row["host_id"]] = name or row["host_id"] or "host not known"
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {key: f"{name} ({key[:6]})" if name in shared else name for key, name in names.items()}


def show_members(rows: Sequence[Mapping[str, Any]], own_host_id: str) -> None:
    """A table of the processes, host by host."""
    hosts = hosts_of(rows)
    ordered = sorted(rows, key=lambda row: (row["host_id"] != own_host_id, hosts[row["host_id"]]))
    cells, last = [], None
    for row in ordered:
        host = hosts[row["host_id"]] + (" (here)" if row["host_id"] == own_host_id else "")
        cells.append(
            (
                host if host != last else "",
                row["kind"],
                row["name"],
                row["address"],
                row["software_version"],
                row["state"],
                _up(row),
                _here(row),
            )
        )
        last = host
    print_table("", ("host", "process", "name", "address", "version", "state", "up", "here"), cells)
    for line in member_problems(rows):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def member_problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each process that is missed, or not as it should be."""
    hosts = hosts_of(rows)
    found = []
    for row in rows:
        who = f"{row['kind']} {row['name']} on {hosts[row['host_id']]}"
        if row["state"] in (Presence.SILENT, Presence.GONE):
            found.append(f"{who} is {row['state']}: last heard of {human_age(row['heard_age_s'])} ago")
        elif row["state"] in WELL or row["state"] == Presence.STOPPED or not row["reason"]:
            continue
        elif row["kind"] != MemberKind.WORKER:  # the conductor says more of its engine
            found.append(f"{who} is {row['state']}: {row['reason']}")
    return found


def _up(row: Mapping[str, Any]) -> str:
    """Since when it runs; a clock that differs would show nonsense, so nothing below 0."""
    if row["state"] == Presence.STOPPED:
        return f"ended {human_age(row['heard_age_s'])} ago"
    if row["state"] == Presence.GONE:
        return ""
    return "" if row["started_s"] is None else human_age(max(0.0, time.time() - row["started_s"]))


def _here(row: Mapping[str, Any]) -> str:
    local = row["here"]
    if local is None:
        return ""
    again = f", started again {local['restarts']}x" if local["restarts"] else ""
    return f"{local['part']}, process {local['pid']}{again}"
