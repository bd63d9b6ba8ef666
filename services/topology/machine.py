"""One look at a machine: the kernel's files, this process's limits, and whether libibverbs can be loaded."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from dataclasses import replace
from pathlib import Path

from mooncache import _native
from mooncache.topology import sysfs
from mooncache.topology.core.model import Host, RdmaDevice

LIBRARY = "libibverbs.so.1"
_CAP_IPC_LOCK = 14


def look(root: Path = Path("/")) -> Host:
    """Return what this machine has. With another root, limits and library are left out: they are not its own."""
    files = sysfs.Sysfs(root)
    devices = sysfs.rdma_devices(files)
    exported, why_not = sysfs.dmabuf(files)
    own = root == Path("/")
    return Host(
        name=socket.gethostname() if own else files.text("proc", "sys", "kernel", "hostname") or root.name,
        numa=tuple(sysfs.numa_nodes(files)),
        devices=_asked([_openable(device) for device in devices]) if own else tuple(devices),
        gpus=tuple(sysfs.gpus(files)),
        memlock_bytes=_memlock_bytes() if own else None,
        privileged=own and _may_lock(files),
        verbs_missing=_verbs_missing() if own else "",
        peermem=sysfs.peermem(files),
        dmabuf=exported,
        dmabuf_missing=why_not,
        kernel=files.text("proc", "sys", "kernel", "osrelease"),
    )


def _asked(devices: list[RdmaDevice]) -> tuple[RdmaDevice, ...]:
    """Add what libibverbs says about GPU memory; nothing when it cannot be asked, which other lines explain."""
    if not devices:
        return ()
    try:
        ports = _native.rdma_ports({})
    except RuntimeError:
        return tuple(devices)
    said = {port["device"]: port["gpu_direct"] for port in ports if port["gpu_direct"]}
    return tuple(replace(device, gpu_direct=said.get(device.name, "")) for device in devices)


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


def _verbs_missing() -> str:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"{LIBRARY} cannot be loaded ({error})"
    return ""
