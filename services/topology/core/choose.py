"""What would be used for which memory, and why: devices per memory place, rails per pair of hosts.

Which ports are used, and under which address, the native engine has said (`Verdict`); which port of a node answers
which of a client is its rule too (`_native.rdma_answer`), so nothing here can differ from what happens. What is added
is the order: the fastest ports first, and for memory at a known place the nearest (`distance`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mooncache import _native
from mooncache.topology.core.distance import Distance, between, to_memory
from mooncache.topology.core.model import (
    GidKind,
    Gpu,
    GpuVendor,
    Host,
    LinkLayer,
    Port,
    RdmaDevice,
    Verdict,
)

_NOT_ACTIVE = "not used, because the port is not active (cable, switch or `ip link set ... up`)"


class TransportKind(StrEnum):
    """What carries bytes between two hosts."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


class RankedRail(NamedTuple):
    """One port as seen from one place in memory."""

    device: str
    port: int
    distance: Distance


class Place(NamedTuple):
    """Where memory is (cpu:0, cuda:1), which ports serve it, which help when those are busy or fail."""

    name: str
    preferred: tuple[RankedRail, ...]
    reserve: tuple[RankedRail, ...]
    reason: str


class RailPair(NamedTuple):
    """A port here and a port there that can talk, with the smaller rate and MTU of both."""

    here: str
    there: str
    rate_gbps: float
    mtu_bytes: int


def verdict_of(port: Port) -> Verdict:
    """What the engine said of a port; where it was not asked, what its rule about addresses says of the files."""
    if port.verdict is not None:
        return port.verdict
    if not port.active:
        return Verdict(False, _NOT_ACTIVE)
    table: list[tuple[int, str, bytes]] = [
        (gid.index, LinkLayer.INFINIBAND if gid.kind == GidKind.IB else gid.kind, gid.packed)
        for gid in port.gids
    ]
    usable, index, why = _native.rdma_address(_layer(port), table, -1)
    if not usable:
        return Verdict(False, why)
    return Verdict(True, "", next(gid for gid in port.gids if gid.index == index), why)


def usable_ports(host: Host) -> list[tuple[RdmaDevice, Port]]:
    """The ports that clients and nodes of a host use, in its order; none where RDMA is off."""
    if host.rdma_off or host.verbs_missing:
        return []
    return [
        (device, port)
        for device in host.devices
        if device.usable
        for port in device.ports
        if verdict_of(port).usable
    ]


def rails_of(host: Host, gpu: Gpu | None = None) -> list[tuple[RdmaDevice, Port]]:
    """The ports that a connection of an idle client takes, best first, `rails_max` at most.

    The fastest first; where the memory of a GPU is registered, those nearest to it before them.
    """
    ports = usable_ports(host)
    far = [between(device.pci, gpu.pci) if gpu is not None else Distance.UNKNOWN for device, _ in ports]
    nearest = min(far, default=Distance.UNKNOWN)
    rails = [(int(_speed(port) * 1000), how != nearest) for (_, port), how in zip(ports, far, strict=True)]
    return [ports[at] for at in _native.rdma_order(rails)][: host.rails_max]


def why_none(host: Host) -> str:
    """Why no port of a host is used; "" when one is."""
    if usable_ports(host):
        return ""
    return host.rdma_off or host.verbs_missing or "no RDMA port is usable"


def places(host: Host) -> list[Place]:
    """Return, for the memory of each NUMA node and each GPU, the ports that would carry its bytes."""
    ports = rails_of(host)
    found = []
    for node in host.numa:
        rails = [RankedRail(d.name, p.number, to_memory(d.pci, d.numa_node, node.index)) for d, p in ports]
        found.append(_place(f"cpu:{node.index}", rails, host))
    for gpu in host.gpus:
        ports = rails_of(host, gpu)
        prefix = "cuda" if gpu.vendor == GpuVendor.NVIDIA else "gpu"
        rails = [RankedRail(d.name, p.number, between(d.pci, gpu.pci)) for d, p in ports]
        found.append(_place(f"{prefix}:{gpu.index}", rails, host))
    return found


def _place(name: str, rails: list[RankedRail], host: Host) -> Place:
    if not rails:
        return Place(name, (), (), f"{why_none(host)}: shared memory on this host, TCP to others")
    rails.sort(key=lambda rail: (rail.distance, rail.device, rail.port))
    nearest = rails[0].distance
    preferred = tuple(rail for rail in rails if rail.distance == nearest)
    others = tuple(rail for rail in rails if rail.distance != nearest)
    many = f"{len(preferred)} ports together" if len(preferred) > 1 else "one port"
    near = "at an unknown distance" if nearest is Distance.UNKNOWN else f"nearest by {nearest.words}"
    return Place(name, preferred, others, f"{many}, {near}")


def rails_between(here: Host, there: Host) -> list[RailPair]:
    """The ports that a client here and a node there connect, as both choose them.

    The client takes its fastest ports; the node answers each on the port nearest to it in the network (the longest
    common prefix of the addresses), among equals on the one with the fewest.
    """
    theirs = usable_ports(there)
    described = [_described(port) for _, port in theirs]
    used = [0] * len(theirs)
    pairs = []
    for device, port in rails_of(here):
        chosen = _native.rdma_answer(described, _described(port), used)
        if chosen is None:
            continue
        used[chosen] += 1
        other, answer = theirs[chosen]
        mtu = min(port.mtu_bytes, answer.mtu_bytes) or max(port.mtu_bytes, answer.mtu_bytes)
        rate = min(_speed(port), _speed(answer))
        pairs.append(RailPair(f"{device.name}/{port.number}", f"{other.name}/{answer.number}", rate, mtu))
    return pairs


def _together_gbps(here: Host, there: Host, pairs: list[RailPair]) -> float:
    """What the pairs carry together: several of them may share a port of the node."""
    sums = []
    for host, names in ((here, {pair.here for pair in pairs}), (there, {pair.there for pair in pairs})):
        ports = {f"{device.name}/{port.number}": port for device, port in usable_ports(host)}
        sums.append(sum(_speed(ports[name]) for name in names))
    return min(*sums, sum(pair.rate_gbps for pair in pairs))


def transport_between(here: Host, there: Host) -> tuple[TransportKind, str]:
    """The transport two hosts would use and why."""
    if here.name == there.name:
        return TransportKind.SHM, "both ends are on one host"
    for host in (here, there):
        if not usable_ports(host):
            return TransportKind.TCP, f"{host.name}: {why_none(host)}"
    pairs = rails_between(here, there)
    if pairs:
        total = _together_gbps(here, there, pairs)
        return TransportKind.RDMA, f"{len(pairs)} rail(s), {total:g} Gb/s together; TCP when all of them fail"
    return TransportKind.TCP, "the ports of the two hosts have no common type of address"


def _layer(port: Port) -> str:
    return GidKind.ROCE_V2 if port.link_layer == LinkLayer.ETHERNET else LinkLayer.INFINIBAND


def _described(port: Port) -> tuple[str, bytes]:
    gid = verdict_of(port).gid
    return _layer(port), gid.packed if gid is not None else bytes(16)


def _speed(port: Port) -> float:
    """Gb/s, as the engine sees it where it was asked."""
    return verdict_of(port).megabits_per_s / 1000 or port.rate_gbps
