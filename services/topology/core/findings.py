"""What is in the way of RDMA and GPUDirect on a host, or between two, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from mooncache.topology.core.choose import (
    TransportKind,
    rails_between,
    transport_between,
    usable_ports,
    verdict_of,
    why_none,
)
from mooncache.topology.core.distance import Distance, between
from mooncache.topology.core.model import (
    DMA_BUF,
    AddressFamily,
    GidKind,
    Host,
    LinkLayer,
    PciLocation,
    Port,
    RdmaDevice,
)

MEMLOCK_WANTED_BYTES = 1 << 30
MTU_BYTES_MAX = 4096
NETDEV_MTU_WANTED_BYTES = 4200  # 4096 bytes of payload and the headers of RoCE v2


class Grade(StrEnum):
    """How well something stands."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


OK, WARN, BAD = Grade


class Finding(NamedTuple):
    """One line: how it stands, about what, what was found, and what to do about it ("" when nothing)."""

    grade: Grade
    what: str
    found: str
    advice: str = ""


def of_host(host: Host) -> list[Finding]:
    """The findings about one host, in the order in which to fix them."""
    found = list(_library(host))
    if not host.devices:
        text = "the kernel lists none: bytes move through shared memory on this host and over TCP to others"
        return [*found, Finding(WARN, "RDMA devices", text, "nothing to do on a host without such hardware")]
    for device in host.devices:
        found += _device(device)
    if host.rdma_off:
        text = f"{host.rdma_off}: TCP is used instead, whatever the ports can do"
        found.append(Finding(WARN, "RDMA", text, "change that setting to use RDMA here"))
    elif not usable_ports(host):
        text = f"{why_none(host)}: TCP is used instead"
        found.append(Finding(BAD, "RDMA", text, "see the lines above"))
    return [*found, *_memory(host), *_gpus(host)]


def between_hosts(here: Host, there: Host) -> list[Finding]:
    """The transport between two hosts, and the obstacles to a better one."""
    kind, reason = transport_between(here, there)
    what = f"{here.name} - {there.name}"
    found = [Finding(OK if kind != TransportKind.TCP else WARN, what, f"{kind}: {reason}")]
    for pair in rails_between(here, there):
        mtus = {_port(here, pair.here).mtu_bytes, _port(there, pair.there).mtu_bytes} - {0}
        text = f"{pair.here} - {pair.there}: {pair.rate_gbps:g} Gb/s, path MTU {pair.mtu_bytes or 'unknown'}"
        if len(mtus) > 1:
            advice = "give both interfaces, and the switches between them, the same MTU"
            found.append(
                Finding(WARN, "rail", f"{text}, the ends differ ({min(mtus)} and {max(mtus)})", advice)
            )
        else:
            found.append(Finding(OK, "rail", text))
    return found


def _port(host: Host, name: str) -> Port:
    device_name, number = name.rsplit("/", 1)
    for device in host.devices:
        for port in device.ports:
            if device.name == device_name and port.number == int(number):
                return port
    raise KeyError(name)


def _library(host: Host) -> Iterator[Finding]:
    if host.verbs_missing:
        if "ibv_get_device_list" in host.verbs_missing:  # the library is there, the kernel answers nothing
            advice = (
                "load the kernel's part (modprobe ib_uverbs); nothing to do on a host without such hardware"
            )
        else:
            advice = "install the distribution's libibverbs1 (Debian: also ibverbs-providers)"
        yield Finding(BAD if host.devices else WARN, "libibverbs", host.verbs_missing, advice)
    else:
        yield Finding(OK, "libibverbs", "can be loaded")


def _device(device: RdmaDevice) -> Iterator[Finding]:
    if not device.usable:
        advice = "give the process read and write access to it (group rdma, or the container's --device)"
        yield Finding(BAD, device.name, device.why_not, advice)
    yield from _link(device.name, device.pci)
    for port in device.ports:
        yield from _of_port(f"{device.name}/{port.number}", port)


def _link(name: str, pci: PciLocation | None) -> Iterator[Finding]:
    if pci is None or not pci.link_lanes or not pci.link_lanes_max:
        return
    if pci.link_lanes < pci.link_lanes_max or pci.link_gts < pci.link_gts_max:
        text = (
            f"the PCIe link runs at {pci.link_gts:g} GT/s x{pci.link_lanes}, "
            f"the device can do {pci.link_gts_max:g} GT/s x{pci.link_lanes_max}"
        )
        yield Finding(
            WARN, name, text, "reseat the card or use another slot; check the slot's lanes in the BIOS"
        )


def _of_port(name: str, port: Port) -> Iterator[Finding]:
    if not port.active:
        text = f"is {port.state or 'in an unknown state'}" + (f" ({port.physical})" if port.physical else "")
        where = f"`ip link set {port.netdev} up`, " if port.netdev else ""
        yield Finding(
            WARN, name, text, f"{where}check cable and switch; on InfiniBand a subnet manager must run"
        )
        return
    verdict = verdict_of(port)
    if verdict.gid is None:
        kinds = {gid.kind for gid in port.gids}
        advice = f"give {port.netdev or 'its interface'} an IP address; see rdma.devices and rdma.gid_index"
        if kinds == {GidKind.ROCE_V1}:
            advice = "only RoCE v1 is there: set RoCE v2 (cma_roce_mode), or update the device's firmware"
        yield Finding(WARN, name, f"is {verdict.reason}", advice)
        return
    if verdict.gid.family == AddressFamily.LINK_LOCAL and port.link_layer == LinkLayer.ETHERNET:
        advice = f"give {port.netdev or 'its interface'} an IPv4 address"
        yield Finding(WARN, name, "has a link-local address only: other hosts may not be reachable", advice)
    rate = f"{port.rate_gbps:g} Gb/s {port.link_layer}, {verdict.gid.address} (index {verdict.gid.index})"
    if 0 < port.mtu_bytes < MTU_BYTES_MAX:
        command = f"ip link set {port.netdev or 'DEVICE'} mtu {NETDEV_MTU_WANTED_BYTES}"
        advice = f"`{command}`, or 9000, on both ends and switches"
        text = f"{rate}; path MTU is {port.mtu_bytes} of {MTU_BYTES_MAX}: interface {port.netdev_mtu_bytes}"
        yield Finding(WARN, name, text, advice)
    else:
        yield Finding(OK, name, f"{rate}: {verdict.gid_reason}")


def _memory(host: Host) -> Iterator[Finding]:
    if host.memlock_bytes is None or host.privileged:
        why = (
            "unlimited"
            if host.memlock_bytes is None
            else "the process may lock any amount of memory (CAP_IPC_LOCK)"
        )
        yield Finding(OK, "locked memory", why)
    elif host.memlock_bytes < MEMLOCK_WANTED_BYTES:
        text = f"the limit is {host.memlock_bytes / 1024:.0f} KiB: registering an arena will fail (ENOMEM)"
        advice = "`ulimit -l unlimited`; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1"
        yield Finding(BAD, "locked memory", text, advice)
    else:
        yield Finding(OK, "locked memory", f"{host.memlock_bytes / (1 << 30):.1f} GiB may be registered")


def _gpus(host: Host) -> Iterator[Finding]:
    if not host.gpus:
        return
    if host.dmabuf:
        yield Finding(OK, "GPUDirect", "dma-buf: GPU memory can be registered without another module")
    elif host.peermem:
        yield Finding(OK, "GPUDirect", f"nvidia-peermem is loaded ({host.dmabuf_missing or 'no dma-buf'})")
    else:
        advice = "load nvidia-peermem, or use NVIDIA's open kernel modules (dma-buf) with Linux 5.12 or newer"
        why = host.dmabuf_missing or "unknown"
        text = f"neither dma-buf ({why}) nor nvidia-peermem: bytes are copied through host memory"
        yield Finding(WARN, "GPUDirect", text, advice)
    for device in host.devices:
        if device.gpu_direct:
            grade = OK if device.gpu_direct == DMA_BUF else WARN
            yield Finding(grade, device.name, f"reaches GPU memory by: {device.gpu_direct}")
    ports = usable_ports(host)
    for gpu in host.gpus:
        yield from _link(f"GPU {gpu.index}", gpu.pci)
        nearest = min((between(device.pci, gpu.pci) for device, _ in ports), default=None)
        if nearest is not None and nearest > Distance.PXB:
            text = f"its nearest port is behind {nearest.words}: a copy through host memory may be faster"
            yield Finding(
                WARN, f"GPU {gpu.index}", text, "use a port below the same PCIe switch, if there is one"
            )
