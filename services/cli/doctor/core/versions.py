"""Which versions run beside each other."""

from __future__ import annotations

from mooncache.cli.doctor.core.facts import Facts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.conductor.core.members import Presence

_NAMES_SHOWN = 6


def software(facts: Facts) -> CheckResult:
    """One version everywhere, or an upgrade that has not ended."""
    found: dict[str, list[str]] = {}
    for name, version in _all(facts):
        if version:
            found.setdefault(version, []).append(name)
    found.setdefault(facts.here.software_version, []).append("this command")
    if facts.pool is None:
        return skipped("versions", "cluster", "no cluster is known here")
    if len(found) == 1:
        return passed("versions", "cluster", f"{facts.here.software_version} everywhere")
    text = "; ".join(f"{version}: {_names(names)}" for version, names in sorted(found.items()))
    fix = "end the upgrade: restart what runs the older version (`mooncache upgrade --check` says in which order)"
    return warned("versions", "cluster", text, fix)


def wire(facts: Facts) -> CheckResult:
    """Connections that nodes refused because of another version of the data protocol."""
    nodes = facts.pool.nodes if facts.pool is not None else ()
    counted = [node for node in nodes if node.counters]
    if not counted:
        return skipped("wire version", "pool", "no node's counters are known")
    refused = {node.node_id: node.counters.get("version_skews", 0) for node in counted}
    if any(refused.values()):
        text = ", ".join(f"{name} refused {count}" for name, count in refused.items() if count)
        fix = "give clients, engines and nodes one version; `mooncache version` says which one a host has"
        return failed("wire version", "pool", f"clients with another wire version: {text} connections", fix)
    return passed("wire version", "pool", "no client with another one was refused")


def _all(facts: Facts) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if facts.pool is not None:
        found.append((facts.pool.master_id or "master", facts.pool.version))
        found += [(node.node_id, node.version) for node in facts.pool.nodes]
    if facts.serving is not None:
        conductor = facts.serving.conductor
        found.append(("conductor", str(conductor.get("software_version", ""))))
        found += [(each["gateway_id"], each["software_version"]) for each in conductor.get("gateways", ())]
        found += [(row["instance_id"], row.get("software_version", "")) for row in facts.serving.instances]
    known = {name for name, _ in found}
    found += [
        (f"{each.kind} {each.name}", each.version)
        for each in facts.members or ()
        if each.name not in known and each.state not in (Presence.GONE, Presence.STOPPED)
    ]
    return found


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} others"
