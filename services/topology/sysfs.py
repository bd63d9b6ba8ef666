"""Reads a host's devices from the kernel's files. What is missing or odd is left out.

`root` puts another tree in place of "/", for tests and for reports that were taken elsewhere. All reads are
bounded; links are followed only inside the root.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from mooncache.topology.core.model import (
    Gid,
    GidKind,
    Gpu,
    GpuVendor,
    LinkLayer,
    NumaNode,
    PciLocation,
    Port,
    PortState,
    RdmaDevice,
)

READ_BYTES_MAX = 65_536
ENTRIES_MAX = 4096
_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ROOT = re.compile(r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_VENDORS = {"0x10de": GpuVendor.NVIDIA, "0x1002": GpuVendor.AMD}
# What Linux takes off an interface's MTU for RoCE: the longest IP, UDP and transport headers and the checksum.
_ROCE_OVERHEAD_BYTES = 96
_PATH_MTUS_BYTES = (4096, 2048, 1024, 512, 256)


class Sysfs:
    """The files below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def text(self, *parts: str) -> str:
        """A file's text without white space around it, "" when there is none."""
        path = self._root.joinpath(*parts)
        try:
            with path.open("rb") as file:
                return file.read(READ_BYTES_MAX).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def number(self, *parts: str) -> float | None:
        """The first number in a file."""
        match = _NUMBER.search(self.text(*parts))
        return float(match[0]) if match else None

    def names(self, *parts: str) -> list[str]:
        """A folder's entries, numbers in order of value."""
        try:
            found = os.listdir(self._root.joinpath(*parts))
        except OSError:
            return []
        return sorted(found[:ENTRIES_MAX], key=_natural)

    def exists(self, *parts: str) -> bool:
        """Whether there is such a file."""
        return self._root.joinpath(*parts).exists()

    def target(self, *parts: str) -> str:
        """The target of a link, as a path below the root; "" when it is missing or outside."""
        path = self._root.joinpath(*parts)
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return ""
        return str(real.relative_to(self._root)) if real.is_relative_to(self._root) else ""


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def pci_location(files: Sysfs, *device: str) -> PciLocation | None:
    """The PCI address of the device behind a link; None for devices that are not on PCI."""
    parts = files.target(*device).split("/")
    roots = [at for at, part in enumerate(parts) if _ROOT.match(part)]
    if not roots:
        return None
    path = tuple(part for part in parts[roots[0] + 1 :] if _ADDRESS.match(part))
    if not path:
        return None
    node = files.number(*device, "numa_node")
    return PciLocation(
        path[-1],
        parts[roots[0]],
        path,
        int(node) if node is not None and node >= 0 else None,
        files.number(*device, "current_link_speed") or 0.0,
        files.number(*device, "max_link_speed") or 0.0,
        int(files.number(*device, "current_link_width") or 0),
        int(files.number(*device, "max_link_width") or 0),
    )


def rdma_devices(files: Sysfs) -> list[RdmaDevice]:
    """The devices of the RDMA subsystem."""
    base = ("sys", "class", "infiniband")
    nodes = {
        files.text("sys", "class", "infiniband_verbs", name, "ibdev"): name
        for name in files.names("sys", "class", "infiniband_verbs")
        if name.startswith("uverbs")
    }
    found = []
    for name in files.names(*base):
        numbers = [int(port) for port in files.names(*base, name, "ports") if port.isdigit()]
        ports = tuple(_port(files, name, number) for number in numbers)
        uverbs = nodes.get(name, "")
        pci = pci_location(files, *base, name, "device")
        numa = pci.numa_node if pci is not None else _numa_of_netdevs(files, ports)
        found.append(
            RdmaDevice(
                name,
                ports,
                pci,
                numa,
                files.text(*base, name, "fw_ver"),
                files.text(*base, name, "board_id"),
                uverbs,
                bool(uverbs),
                "" if uverbs else "has no uverbs device: load ib_uverbs",
            )
        )
    return found


def _numa_of_netdevs(files: Sysfs, ports: tuple[Port, ...]) -> int | None:
    for port in ports:
        node = (
            files.number("sys", "class", "net", port.netdev, "device", "numa_node") if port.netdev else None
        )
        if node is not None and node >= 0:
            return int(node)
    return None


def _port(files: Sysfs, device: str, number: int) -> Port:
    base = ("sys", "class", "infiniband", device, "ports", str(number))
    layer = LinkLayer(files.text(*base, "link_layer") or LinkLayer.ETHERNET)
    gids = []
    for index in files.names(*base, "gids"):
        value = files.text(*base, "gids", index)
        if not index.isdigit() or not value or value == _NO_GID:
            continue
        words = files.text(*base, "gid_attrs", "types", index)
        if layer != LinkLayer.ETHERNET:
            kind = GidKind.IB
        else:
            kind = GidKind.ROCE_V1 if words.startswith("IB") else GidKind(words)
        with contextlib.suppress(ValueError):  # not a kernel's file: --root leads anywhere
            gids.append(Gid(int(index), value, kind, files.text(*base, "gid_attrs", "ndevs", index)))
    netdev = next((gid.netdev for gid in gids if gid.netdev), "")
    netdev_mtu = int(files.number("sys", "class", "net", netdev, "mtu") or 0) if netdev else 0
    return Port(
        number,
        PortState(_after_number(files.text(*base, "state"))),
        layer,
        files.number(*base, "rate") or 0.0,
        _after_number(files.text(*base, "phys_state")),
        _lid(files.text(*base, "lid")),
        _path_mtu(netdev_mtu) if layer == LinkLayer.ETHERNET else 0,
        netdev,
        netdev_mtu,
        tuple(gids),
    )


def _after_number(text: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    return text.split(":", 1)[-1].strip()


def _lid(text: str) -> int:
    try:
        return int(text, 16) if text else 0
    except ValueError:
        return 0


def _path_mtu(netdev_mtu: int) -> int:
    """The path MTU that RoCE uses on an interface; 0 when the interface is not known."""
    room = netdev_mtu - _ROCE_OVERHEAD_BYTES
    return next((size for size in _PATH_MTUS_BYTES if size <= room), 0)


def gpus(files: Sysfs) -> list[Gpu]:
    """Display and 3D controllers of vendors whose memory can be registered, by PCI address."""
    found: list[Gpu] = []
    counts: dict[GpuVendor, int] = {}
    for address in files.names("sys", "bus", "pci", "devices"):
        base = ("sys", "bus", "pci", "devices", address)
        vendor = _VENDORS.get(files.text(*base, "vendor"))
        if vendor is None or not files.text(*base, "class").startswith("0x03"):
            continue
        pci = pci_location(files, *base)
        if pci is None:
            continue
        information = files.text("proc", "driver", "nvidia", "gpus", address, "information")
        match = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
        model = match[1].strip() if match else f"{vendor} {files.text(*base, 'device')}"
        found.append(Gpu(counts.setdefault(vendor, 0), model, pci, vendor))
        counts[vendor] += 1
    return found


def numa_nodes(files: Sysfs) -> list[NumaNode]:
    """The NUMA nodes; a single one for machines that report none."""
    base = ("sys", "devices", "system", "node")
    found = []
    for name in files.names(*base):
        if not re.fullmatch(r"node\d+", name):
            continue
        total = re.search(r"MemTotal:\s*(\d+) kB", files.text(*base, name, "meminfo"))
        pages = files.number(*base, name, "hugepages", "hugepages-2048kB", "free_hugepages")
        found.append(
            NumaNode(
                int(name[4:]),
                files.text(*base, name, "cpulist"),
                int(total[1]) * 1024 if total else 0,
                int(pages or 0),
            )
        )
    return found or [NumaNode(0, files.text("sys", "devices", "system", "cpu", "online"), 0)]


def peermem(files: Sysfs) -> bool:
    """Whether a module that lets network devices reach GPU memory is loaded."""
    return any(files.exists("sys", "module", name) for name in ("nvidia_peermem", "nv_peer_mem"))


def dmabuf(files: Sysfs) -> tuple[bool, str]:
    """Whether GPU memory can be exported as a dma-buf, and the reason if not."""
    version = files.text("proc", "driver", "nvidia", "version")
    if not version:
        return False, "the NVIDIA driver is not loaded"
    if "Open Kernel Module" not in version:
        return False, "the NVIDIA driver is not the open kernel module"
    match = re.match(r"(\d+)\.(\d+)", files.text("proc", "sys", "kernel", "osrelease"))
    if match is None or (int(match[1]), int(match[2])) < (5, 12):
        return False, "the kernel is older than 5.12"
    return True, ""
