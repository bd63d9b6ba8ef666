"""What `mooncache status` and `mooncache top` tell of the conductor: how it decides, and what it has done so far."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from mooncache.proto.v1 import conductor_pb2
from mooncache.reporting.output import human_bytes

CONDUCTOR_ROLES: Final = {
    conductor_pb2.CONDUCTOR_ROLE_LEADER: "leader",
    conductor_pb2.CONDUCTOR_ROLE_STANDBY: "standby",
    conductor_pb2.CONDUCTOR_ROLE_SEEKING: "seeking a leader",
    conductor_pb2.CONDUCTOR_ROLE_UNREACHABLE: "does not answer",
}


def conductor_row(answer: conductor_pb2.GetConductorStatusResponse) -> dict[str, object]:
    """GetConductorStatusResponse as a plain document; counts go back to the start of the conductor."""
    decisions = dict(sorted(answer.decisions.items()))
    admitted = decisions.pop("admitted", 0)
    return {
        "software_version": answer.software_version,
        "uptime_s": answer.uptime_ms / 1e3,
        "policy": answer.policy,
        "admission": answer.admission,
        "rebalance_roles": answer.rebalance_roles,
        "replicate_bytes_per_s": answer.replicate_bytes_per_s,
        "pool_connected": answer.pool_connected,
        "requests_active": answer.active_request_count,
        "admitted_total": admitted,
        "refused_total": sum(decisions.values()),
        "refused": decisions,
        "roles": dict(sorted(answer.roles.items())),
        "role_switches": dict(sorted(answer.role_switches.items())),
        "copied_prefixes_total": answer.copied_prefix_count,
        "trimmed_prefixes_total": answer.trimmed_prefix_count,
        "trimmed_blocks_total": answer.trimmed_block_count,
        "copied_segments": answer.copied_segment_count,
        "conductors": [
            {
                "target": view.target,
                "role": CONDUCTOR_ROLES.get(view.role, "unknown"),
                "term": view.term,
                "answers": view.self,
                "behind_s": view.behind_ms / 1e3,
            }
            for view in answer.conductors
        ],
        "gateways": [
            {
                "gateway_id": view.gateway.gateway_id,
                "url": view.gateway.url,
                "software_version": view.gateway.software_version,
                "draining": view.gateway.draining,
                "heard_age_s": view.heard_age_ms / 1e3,
            }
            for view in answer.gateways
        ],
    }


def conductor_lines(row: dict[str, Any]) -> list[str]:
    """The same in words: how it decides, then what it did."""
    rate = row["replicate_bytes_per_s"]
    how = [
        f"policy {row['policy']}",
        "admission on" if row["admission"] else "admission off: no request is refused",
        "roles follow the load" if row["rebalance_roles"] else "roles fixed",
        f"hot prefixes copied, at most {human_bytes(rate)}/s" if rate else "hot prefixes not copied",
    ]
    reasons = ", ".join(f"{reason} {count}" for reason, count in row["refused"].items())
    refused = f"refused {row['refused_total']}" + (f" ({reasons})" if reasons else "")
    roles = ", ".join(f"{count} {role}" for role, count in row["roles"].items()) or "none ready"
    switches = sum(row["role_switches"].values())
    done = [
        f"admitted {row['admitted_total']}, {refused}",
        f"roles now: {roles}" + (f", switched {switches}" if switches or row["rebalance_roles"] else ""),
    ]
    if row["copied_prefixes_total"] or row["trimmed_prefixes_total"]:
        done.append(
            f"prefixes copied {row['copied_prefixes_total']}, trimmed {row['trimmed_prefixes_total']}, "
            f"{row['copied_segments']} with copies now"
        )
    return ["; ".join(how), "; ".join(done), *_standing_lines(row["conductors"])]


def _standing_lines(conductors: list[dict[str, Any]]) -> list[str]:
    """Each of several conductors in a line: whether it leads, and since when the present leader does."""
    lines = []
    for each in conductors:
        # Terms are at least the wall clock's milliseconds.
        since = (
            datetime.fromtimestamp(each["term"] / 1e3, UTC).strftime("%H:%M:%S UTC") if each["term"] else ""
        )
        said = f"term {each['term']}" + (f" since {since}" if each["role"] == "leader" else "")
        lines.append(f"{each['target']} {each['role']}" + (f", {said}" if each["term"] else ""))
    return lines
