"""What would be used for which memory, and why: devices per memory place, an address per port, rails per pair of hosts.

A port that is not active or that may not be opened is never chosen. Among the others the nearest come first
(`distance`); ports as near as the nearest are used together, the rest is kept for when those fail.
"""

from __future__ import annotations

from typing import NamedTuple

from mooncache.topology.core.distance import Distance, between, to_memory
from mooncache.topology.core.model import ETHERNET, ROCE_V2, Gid, Host, Port, RdmaDevice

_GID_ORDER = {"ib": 0, "ipv4": 1, "ipv6": 2, "link-local": 3}


class ChosenGid(NamedTuple):
    """An address of a port and why this one; gid is None when there is none to use."""

    gid: Gid | None
    reason: str


class Rail(NamedTuple):
    """One port as seen from one place in memory."""

    device: str
    port: int
    distance: Distance


class Place(NamedTuple):
    """Where memory is (cpu:0, cuda:1), which ports serve it, which are kept in reserve."""

    name: str
    preferred: tuple[Rail, ...]
    reserve: tuple[Rail, ...]
    reason: str


class RailPair(NamedTuple):
    """A port here and a port there that can talk, with the smaller rate and MTU of both."""

    here: str
    there: str
    rate_gbps: float
    mtu_bytes: int


def gid_of(port: Port) -> ChosenGid:
    """Choose the address of a port: RoCE v2 before v1, IPv4 before IPv6 before link-local."""
    if not port.gids:
        return ChosenGid(None, "the port has no address")
    if port.link_layer != ETHERNET:
        return ChosenGid(port.gids[0], "InfiniBand uses the first")
    modern = [gid for gid in port.gids if gid.kind == ROCE_V2]
    if not modern:
        return ChosenGid(
            port.gids[0], "only RoCE v1 addresses are there: both ends must be in one Ethernet segment"
        )
    best = min(modern, key=lambda gid: (_GID_ORDER[gid.family], gid.index))
    return ChosenGid(best, f"RoCE v2 over {best.family}, the best of {len(port.gids)} addresses")


def usable_ports(host: Host) -> list[tuple[RdmaDevice, Port]]:
    """Return active ports of devices that may be opened and that have an address."""
    return [
        (device, port)
        for device in host.devices
        if device.usable
        for port in device.ports
        if port.active and gid_of(port).gid is not None
    ]


def places(host: Host) -> list[Place]:
    """Return, for the memory of each NUMA node and each GPU, the ports that would carry its bytes."""
    ports = usable_ports(host)
    found = []
    for node in host.numa:
        rails = [Rail(d.name, p.number, to_memory(d.pci, d.numa_node, node.index)) for d, p in ports]
        found.append(_place(f"cpu:{node.index}", rails))
    for gpu in host.gpus:
        prefix = "cuda" if gpu.vendor == "nvidia" else "gpu"
        rails = [Rail(d.name, p.number, between(d.pci, gpu.pci)) for d, p in ports]
        found.append(_place(f"{prefix}:{gpu.index}", rails))
    return found


def _place(name: str, rails: list[Rail]) -> Place:
    if not rails:
        return Place(name, (), (), "no RDMA port is usable: shared memory on this host, TCP to others")
    rails.sort(key=lambda rail: (rail.distance, rail.device, rail.port))
    nearest = rails[0].distance
    preferred = tuple(rail for rail in rails if rail.distance == nearest)
    reserve = tuple(rail for rail in rails if rail.distance != nearest)
    many = f"{len(preferred)} ports together" if len(preferred) > 1 else "one port"
    return Place(name, preferred, reserve, f"{many}, nearest by {nearest.words}")


def rails_between(here: Host, there: Host) -> list[RailPair]:
    """Pair ports of two hosts: the n-th fastest with the n-th fastest of the same kind of address.

    Ports can talk when their addresses are of one family (IPv4, IPv6, InfiniBand); link-local ones only by chance.
    """
    left = dict(_named(there))
    pairs = []
    for name, port in _named(here):
        mine = gid_of(port).gid
        same = [
            (key, other)
            for key, other in left.items()
            if other.link_layer == port.link_layer and _family(other) == (mine.family if mine else "")
        ]
        if not same or mine is None or mine.family == "link-local":
            continue
        key, other = max(same, key=lambda item: (item[1].rate_gbps, item[0] == name))
        del left[key]
        mtu = min(port.mtu_bytes, other.mtu_bytes) or max(port.mtu_bytes, other.mtu_bytes)
        pairs.append(RailPair(name, key, min(port.rate_gbps, other.rate_gbps), mtu))
    return pairs


def transport_between(here: Host, there: Host) -> tuple[str, str]:
    """Return the transport two hosts would use and why."""
    if here.name == there.name:
        return "shm", "both ends are on one host"
    pairs = rails_between(here, there)
    if pairs and not here.verbs_missing and not there.verbs_missing:
        total = sum(pair.rate_gbps for pair in pairs)
        return "rdma", f"{len(pairs)} rail(s), {total:g} Gb/s together; TCP when all of them fail"
    for host in (here, there):
        if host.verbs_missing:
            return "tcp", f"{host.name}: {host.verbs_missing}"
        if not usable_ports(host):
            return "tcp", f"{host.name} has no usable RDMA port"
    return "tcp", "the ports of both hosts have no kind of address in common"


def _named(host: Host) -> list[tuple[str, Port]]:
    named = [(f"{device.name}/{port.number}", port) for device, port in usable_ports(host)]
    return sorted(named, key=lambda item: (-item[1].rate_gbps, item[0]))


def _family(port: Port) -> str:
    gid = gid_of(port).gid
    return gid.family if gid is not None else ""
