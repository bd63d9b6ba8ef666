"""`mooncache topology` and `mooncache doctor rdma`: what moves bytes here, how near it is, what would be chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mooncache.cli.common import AsJson
from mooncache.cli.findings import report, show
from mooncache.config.small_files import read_small
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_OK, console, print_json
from mooncache.topology import machine
from mooncache.topology.core import choose, findings
from mooncache.topology.core.distance import Distance, between
from mooncache.topology.core.model import Gpu, Host, PciLocation, RdmaDevice

PEER_BYTES_MAX = 4 << 20

Root = Annotated[Path, Parameter(help="Read the kernel's files below this folder instead of /.")]
Peer = Annotated[
    Path | None,
    Parameter(
        help="Output of `mooncache topology --json` from another host; shows how the two would connect."
    ),
]


def topology(*, root: Root = Path("/"), peer: Peer = None, json: AsJson = False) -> int:
    """Show RDMA devices, GPUs and memory of this host, how far apart they are, and which port serves which memory.

    For example:

        mooncache topology --json > here.json       # then, on another host
        mooncache topology --peer here.json
    """
    host = _look(root)
    other = _read_peer(peer) if peer is not None else None
    if json:
        print_json(_document(host, other))
        return EXIT_OK
    console.print(_tree(host))
    if host.gpus and host.devices:
        console.print()
        console.print(_distances(host), end="")
    else:
        console.print()
    console.print(_choices(host))
    if other is not None:
        show(findings.between_hosts(host, other))
    return EXIT_OK


def doctor_rdma(*, root: Root = Path("/"), peer: Peer = None, json: AsJson = False) -> int:
    """Say what keeps RDMA and GPUDirect from working here, and how to fix it. Exit code 1 when something is broken.

    For example:

        mooncache doctor rdma
    """
    host = _look(root)
    found = findings.of_host(host)
    if peer is not None:
        found += findings.between_hosts(host, _read_peer(peer))
    return report(found, as_json=json)


def _look(root: Path) -> Host:
    """Look at the machine below `root`. Raises InvalidArgument."""
    if not (root / "sys").is_dir():
        raise InvalidArgument(f"--root: {root} has no folder sys, so it is not the / of a Linux machine.")
    return machine.look(root)


def _document(host: Host, other: Host | None) -> dict[str, object]:
    document: dict[str, object] = {
        "host": msgspec.to_builtins(host),
        "places": [
            {
                "memory": place.name,
                "preferred": [f"{rail.device}/{rail.port}" for rail in place.preferred],
                "reserve": [f"{rail.device}/{rail.port}" for rail in place.reserve],
                "reason": place.reason,
            }
            for place in choose.places(host)
        ],
        "findings": [finding._asdict() for finding in findings.of_host(host)],
    }
    if other is not None:
        kind, reason = choose.transport_between(host, other)
        rails = [pair._asdict() for pair in choose.rails_between(host, other)]
        document["peer"] = {"name": other.name, "transport": kind, "reason": reason, "rails": rails}
    return document


class _Saved(msgspec.Struct):
    host: Host


def _read_peer(path: Path) -> Host:
    """Read what another host printed. Raises InvalidArgument."""
    data = read_small(path, "--peer file", InvalidArgument, PEER_BYTES_MAX)
    try:
        return msgspec.json.decode(data, type=_Saved).host
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"--peer: {path} is not what `mooncache topology --json` prints: {error}"
        raise InvalidArgument(text) from error


def _tree(host: Host) -> Tree:
    tree = Tree(Text(f"{host.name}  (Linux {host.kernel})", style="bold"))
    branches = {}
    for node in host.numa:
        memory = f", {node.memory_bytes / (1 << 30):.0f} GiB" if node.memory_bytes else ""
        pages = f", {node.huge_pages_free} huge pages free" if node.huge_pages_free else ""
        branches[node.index] = tree.add(Text(f"NUMA {node.index}: processors {node.cpus}{memory}{pages}"))
    rest = None
    for gpu in host.gpus:
        branch = branches.get(-1 if gpu.pci.numa_node is None else gpu.pci.numa_node)
        if branch is None:
            branch = rest = rest or tree.add(Text("unknown NUMA node"))
        branch.add(_gpu(gpu))
    for device in host.devices:
        branch = branches.get(-1 if device.numa_node is None else device.numa_node)
        if branch is None:
            branch = rest = rest or tree.add(Text("unknown NUMA node"))
        _add_device(branch, device)
    if not host.devices:
        tree.add(Text("no RDMA device", style="dim"))
    if not host.gpus:
        tree.add(Text("no GPU", style="dim"))
    return tree


def _link(pci: PciLocation | None) -> str:
    if pci is None:
        return "software device"
    rate = f", {pci.bytes_per_s / 1e9:.0f} GB/s each way" if pci.bytes_per_s else ""
    return f"{pci.address}{rate}"


def _gpu(gpu: Gpu) -> Text:
    return Text.assemble((f"GPU {gpu.index}", "magenta"), f" {gpu.model}  {_link(gpu.pci)}")


def _add_device(branch: Tree, device: RdmaDevice) -> None:
    text = Text.assemble((device.name, "cyan"), f"  {_link(device.pci)}")
    if device.firmware:
        text.append(f", firmware {device.firmware}")
    if not device.usable:
        text.append(f"  {device.why_not}", style="red")
    below = branch.add(text)
    for port in device.ports:
        verdict = choose.verdict_of(port)
        line = Text(f"port {port.number} ")
        line.append(port.state or "UNKNOWN", style="green" if port.active else "yellow")
        line.append(f" {port.rate_gbps:g} Gb/s {port.link_layer}")
        if port.netdev:
            line.append(f" over {port.netdev} (MTU {port.netdev_mtu_bytes}, path {port.mtu_bytes or '?'})")
        if verdict.gid is not None:
            line.append(f"  {verdict.gid.address} [{verdict.gid.index}]: {verdict.gid_reason}")
        elif port.active:
            line.append(f"  {verdict.reason}", style="yellow")
        below.add(line)


def _distances(host: Host) -> Group:
    table = Table(box=None, pad_edge=False)
    table.add_column("distance")
    for device in host.devices:
        table.add_column(device.name, justify="center")
    seen = set()
    for gpu in host.gpus:
        row = [between(device.pci, gpu.pci) for device in host.devices]
        seen.update(row)
        table.add_row(f"GPU {gpu.index}", *(distance.name for distance in row))
    legend = "; ".join(f"{d.name}: {d.words}" for d in Distance if d in seen)
    return Group(table, Text(legend, style="dim"), Text())


def _choices(host: Host) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("memory", "preferred ports", "when those are busy", "why"):
        table.add_column(name, overflow="fold")
    for place in choose.places(host):
        preferred = ", ".join(f"{rail.device}/{rail.port}" for rail in place.preferred)
        reserve = ", ".join(f"{rail.device}/{rail.port}" for rail in place.reserve)
        table.add_row(place.name, preferred or "-", reserve or "-", place.reason)
    return table
