"""One look at a machine: the kernel's files, this process's limits, and what the native engine makes of each port.

Whether a port is used, under which address and why not is the engine's to say: it is asked with the configuration
that clients and nodes here would have, and its words are kept as they are.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mooncache import _native
from mooncache.config import Config, load
from mooncache.topology import sysfs
from mooncache.topology.core.model import Gid, GidKind, Host, LinkLayer, Port, RdmaDevice, Verdict

_CAP_IPC_LOCK = 14


def look(root: Path = Path("/"), config: Config | None = None) -> Host:
    """The devices of this machine, judged with `config` (default: the loaded configuration).

    With another root, limits, library and configuration are left out: they are not its own. Raises ConfigInvalid.
    """
    files = sysfs.Sysfs(root)
    devices = tuple(sysfs.rdma_devices(files))
    exported, why_not = sysfs.dmabuf(files)
    host = Host(
        name=files.text("proc", "sys", "kernel", "hostname") or root.name,
        numa=tuple(sysfs.numa_nodes(files)),
        devices=devices,
        gpus=tuple(sysfs.gpus(files)),
        peermem=sysfs.peermem(files),
        dmabuf=exported,
        dmabuf_missing=why_not,
        kernel=files.text("proc", "sys", "kernel", "osrelease"),
    )
    if root != Path("/"):
        return host
    config = load() if config is None else config
    judged, missing = _judged([_openable(device) for device in devices], config.rdma.native())
    return replace(
        host,
        name=socket.gethostname(),
        devices=judged,
        memlock_bytes=_memlock_bytes(),
        privileged=_may_lock(files),
        verbs_missing=missing,
        rdma_off=why_off(config),
        rails_max=config.rdma.rails_max,
    )


def why_off(config: Config) -> str:
    """Why clients and nodes with this configuration do without RDMA; "" when they do not."""
    if not config.rdma.enabled:
        return "RDMA is switched off (rdma.enabled)"
    if config.tls.enabled:
        return "TLS is configured (tls.enabled), and RDMA is not encrypted"
    return ""


def _judged(
    devices: Sequence[RdmaDevice], settings: Mapping[str, object]
) -> tuple[tuple[RdmaDevice, ...], str]:
    """The devices with what the engine says of each port; unchanged, and why, when it cannot ask libibverbs."""
    try:
        said = _native.rdma_ports(dict(settings))
    except RuntimeError as error:
        return tuple(devices), str(error.args[-1])
    return tuple(
        _with_verdicts(device, [port for port in said if port["device"] == device.name]) for device in devices
    ), ""


def _with_verdicts(device: RdmaDevice, said: Sequence[Mapping[str, Any]]) -> RdmaDevice:
    by_number = {port["port"]: port for port in said}
    # a device that could not be opened has one line for all of its ports
    whole = (
        said[0]["reason"]
        if said
        else "not used, because libibverbs does not list it: is its provider installed?"
    )
    ports = []
    for port in device.ports:
        described = by_number.get(port.number)
        verdict = Verdict(False, whole) if described is None else _verdict(described, port)
        mtu_bytes = described["mtu_bytes"] if described is not None else 0
        ports.append(replace(port, verdict=verdict, mtu_bytes=mtu_bytes or port.mtu_bytes))
    gpu_direct = next((port["gpu_direct"] for port in said if port["gpu_direct"]), "")
    return replace(device, ports=tuple(ports), gpu_direct=gpu_direct)


def _verdict(described: Mapping[str, Any], port: Port) -> Verdict:
    if not described["usable"]:
        return Verdict(False, described["reason"], megabits_per_s=described["megabits_per_s"])
    kind = GidKind.IB if described["link_layer"] == LinkLayer.INFINIBAND else GidKind.ROCE_V2
    netdev = next((gid.netdev for gid in port.gids if gid.index == described["gid_index"]), "")
    gid = Gid.read(described["gid_index"], described["gid"], kind, netdev)
    return Verdict(True, "", gid, described["gid_reason"], described["megabits_per_s"])


def _openable(device: RdmaDevice) -> RdmaDevice:
    path = f"/dev/infiniband/{device.uverbs}"
    if not device.usable or os.access(path, os.R_OK | os.W_OK):
        return device
    what = "may not be opened by this user" if os.path.exists(path) else "is not there"
    return replace(device, usable=False, why_not=f"{path} {what}")


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _may_lock(files: sysfs.Sysfs) -> bool:
    for line in files.text("proc", "self", "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
