"""Ports: from here to each node, from each node to each other one, and what is in the way on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from mooncache.cli.doctor.core.facts import Facts, NodeFacts, PoolFacts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned

PAIRS_SHOWN = 4
FAR_NODES_MIN = 3
FAR_FACTOR = 4.0
FAR_MS = 1.0
"""Below it no node is far: the difference is a scheduler's."""
_LOOPBACK = ("127.", "localhost:", "[::1]")


def local_ports(facts: Facts) -> CheckResult:
    """Before a cluster runs here: whether its ports are free."""
    if facts.pool is not None:
        return skipped("local ports", "here", "a cluster is known here")
    if facts.busy_ports:
        taken = ", ".join(f"{port} ({setting})" for setting, port in facts.busy_ports.items())
        fix = "`ss -ltnp` shows what has them; `mooncache up` takes other ports then, single services do not"
        return warned("local ports", "here", f"something else has {taken}", fix)
    return passed("local ports", "here", "those of the settings are free")


def from_here(pool: PoolFacts, own_host_id: str) -> Iterator[CheckResult]:
    """Whether each node's control port answers us."""
    lost = _lost(pool)
    for node in pool.nodes:
        if not node.target:
            yield skipped("here to node", node.node_id, "control ports are shown to the cluster token alone")
        elif node.error:
            also = "; no other node reaches it either" if _is_lost_to_all(node, pool, lost) else ""
            text = f"{node.target} does not answer: {node.error.rstrip('.')}{also}"
            yield failed("here to node", node.node_id, text, _unreachable_fix(node, own_host_id))
        else:
            yield passed("here to node", node.node_id, f"{node.target} answers")


def _unreachable_fix(node: NodeFacts, own_host_id: str) -> str:
    if node.host_id == own_host_id:
        return f"see its log, then `mooncache node restart {node.node_id}` (of `mooncache up`), or its service manager"
    if node.target.startswith(_LOOPBACK):
        return "set store_node.advertise_host on it to an address that other hosts reach"
    host, _, port = node.target.rpartition(":")
    return f"see whether the node runs (its log), then the firewall: `nc -vz {host} {port}` from here"


def between_nodes(pool: PoolFacts) -> Iterator[CheckResult]:
    """Whether nodes reach each other, over both ports and in both directions.

    A node that none of the others reaches is one result: it is the node, not each way to it. When it does not answer us
    either, `from_here` has said so.
    """
    if not any(node.reach for node in pool.nodes):
        why = "there is one node" if len(pool.nodes) < 2 else "no node could be asked"
        yield skipped("node to node", "pool", why)
        return
    lost = _lost(pool)
    for node in pool.nodes:
        if node.error and _is_lost_to_all(node, pool, lost):
            yield skipped("node to node", node.node_id, "the node itself does not answer")
        else:
            yield _way_to(node, _tried(node, pool), lost.get(node.node_id, []), pool)


def far_nodes(pool: PoolFacts) -> Iterator[CheckResult]:
    """Nodes that are much farther from the others than those are from each other."""
    ways: dict[str, list[float]] = {node.node_id: [] for node in pool.nodes}
    for node in pool.nodes:
        for peer, took_ms in node.latencies_ms.items():
            for end in {node.node_id, peer} & ways.keys():
                ways[end].append(took_ms)
    known = {name: median_low(found) for name, found in ways.items() if found}
    if len(known) < FAR_NODES_MIN:
        yield skipped("far node", "pool", f"ways between {len(known)} nodes are known, which say too little")
        return
    usual_ms = median_low(known.values())
    far = {name: took for name, took in known.items() if took > max(FAR_MS, FAR_FACTOR * usual_ms)}
    if not far:
        yield passed(
            "far node", "pool", f"a round trip between nodes takes {usual_ms:.2f} ms, none is far off"
        )
    for name, took_ms in far.items():
        text = f"a round trip to other nodes takes {took_ms:.2f} ms, between others {usual_ms:.2f} ms"
        fix = "see the load and the network of its host (`mtr` from another node); who reads its blocks waits this long"
        yield warned("far node", name, text, fix)


def _lost(pool: PoolFacts) -> dict[str, list[str]]:
    """Node -> those that did not reach it."""
    found: dict[str, list[str]] = {}
    for node in pool.nodes:
        for peer, reach in node.reach.items():
            if reach.control or reach.data:
                found.setdefault(peer, []).append(node.node_id)
    return found


def _tried(node: NodeFacts, pool: PoolFacts) -> int:
    return sum(node.node_id in other.reach for other in pool.nodes)


def _is_lost_to_all(node: NodeFacts, pool: PoolFacts, lost: dict[str, list[str]]) -> bool:
    return 0 < _tried(node, pool) == len(lost.get(node.node_id, []))


def _way_to(node: NodeFacts, tried: int, lost: list[str], pool: PoolFacts) -> CheckResult:
    if not tried:
        return skipped("node to node", node.node_id, "no other node could be asked about it")
    if not lost:
        return passed("node to node", node.node_id, f"{tried} other node{'s' if tried > 1 else ''} reach it")
    said = next(other.reach[node.node_id] for other in pool.nodes if other.node_id == lost[0])
    ports = [("control port " + node.target, said.control)] if said.control else []
    ports += [("data port " + node.data, said.data)] if said.data else []
    who = "no other node reaches it" if len(lost) == tried else f"not reached from {_names(lost)}"
    fix = f"open {' and '.join(port for port, _ in ports)} between the hosts, in both directions"
    if node.target.startswith(_LOOPBACK) and len({other.host_id for other in pool.nodes}) > 1:
        fix = "set store_node.advertise_host on it to an address that other hosts reach"
    said_of = "; ".join(f"{port}: {why.rstrip('.')}" for port, why in ports)
    return failed("node to node", node.node_id, f"{who}: {said_of}", fix)


def _names(nodes: list[str]) -> str:
    shown = ", ".join(nodes[:PAIRS_SHOWN])
    return shown if len(nodes) <= PAIRS_SHOWN else f"{shown} and {len(nodes) - PAIRS_SHOWN} others"
