"""One look at the host of this process: its limits, memory, disks, files and devices, as `HostFacts`.

Nothing here judges, and nothing here fails: what cannot be found out is left at its default, or has a sentence that
says why. All reads are bounded. A folder of a tier is tried with one file that has no name and no bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from mooncache._version import __version__
from mooncache.client.host import host_id
from mooncache.config import Config
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.certificate_dates import validity_of_file
from mooncache.topology import machine
from mooncache.topology.core.host_facts import ArenaFacts, Certificate, Disk, HostFacts, PrivateFile
from mooncache.topology.core.model import Host
from mooncache.topology.sysfs import Sysfs

_SETUP_CALL: Final = 425  # io_uring_setup, the same number on every processor
_SETUP_BYTES: Final = 120
_ENTRIES_MAX: Final = 4096
_MOUNTS_MAX: Final = 4096
_DISABLED_FOR: Final = {"1": "all but privileged processes", "2": "every process"}


def examine(
    config: Config, *, arena: ArenaFacts, ssd_paths: Sequence[str], memory_left_bytes: int, node_id: str = ""
) -> HostFacts:
    """Describe this host as a process with `config` meets it. Blocks for some milliseconds: call it in a thread.

    Args:
        arena: the memory of the node's blocks; of a host without a node what its settings ask for.
        ssd_paths: folders of the SSD tier; none without one.
        memory_left_bytes: what this process may still take.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Sysfs(Path("/"))
    shm_bytes, shm_free_bytes = _space(Path("/dev/shm"))  # noqa: S108  (looked at, nothing is made there)
    return HostFacts(
        host=_devices(config),
        host_id=config.store_node.host_id or host_id(),
        software_version=__version__,
        wall_s=time.time(),
        open_files=_count(Path("/proc/self/fd")),
        open_files_max=0 if soft == resource.RLIM_INFINITY else soft,
        memory_bytes=_memory_bytes(files),
        memory_limit_bytes=memory_limit_bytes(files),
        memory_left_bytes=memory_left_bytes,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        io_uring=why_no_io_uring(files),
        arena=arena,
        disks=tuple(_disks(config, ssd_paths, node_id)),
        certificates=tuple(_certificates(config)),
        private_files=tuple(_private_files(config)),
        tls=config.tls.enabled,
        open_binds=tuple(_open_binds(config)),
    )


def _devices(config: Config) -> Host:
    try:
        return machine.look(config=config)
    except (OSError, ValueError) as error:
        return Host(name=os.uname().nodename, kernel=os.uname().release, verbs_missing=str(error))


def _memory_bytes(files: Sysfs) -> int:
    for line in files.text("proc", "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_limit_bytes(files: Sysfs) -> int:
    """The smallest limit of this process' memory cgroups (version 2); 0 when there is none."""
    lines = files.text("proc", "self", "cgroup").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    limits = []
    for group in (Path(own), *Path(own).parents):
        text = files.text("sys", "fs", "cgroup", str(group).lstrip("/"), "memory.max")
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=0)


def why_no_io_uring(files: Sysfs) -> str:
    """Why io_uring cannot be used by this process; "" when it can: a ring of one entry is made and closed again."""
    library = ctypes.CDLL(None, use_errno=True)
    ring = library.syscall(_SETUP_CALL, 1, ctypes.create_string_buffer(_SETUP_BYTES))
    if ring >= 0:
        os.close(ring)
        return ""
    number = ctypes.get_errno()
    for_whom = _DISABLED_FOR.get(files.text("proc", "sys", "kernel", "io_uring_disabled"))
    if for_whom is not None and number == errno.EPERM:
        return f"kernel.io_uring_disabled refuses it to {for_whom}"
    if number in {errno.EPERM, errno.EACCES}:
        return "the container's seccomp profile refuses it"
    return f"the kernel refuses it ({os.strerror(number)})"


def _disks(config: Config, ssd_paths: Sequence[str], node_id: str) -> Iterable[Disk]:
    node = config.store_node
    if node.ssd_bytes:
        for path in ssd_paths:
            yield look_at_folder("ssd", Path(path), node.ssd_bytes)
    if node.shared_path is not None:
        own = (node_id,) if node_id else ()
        yield look_at_folder("shared", node.shared_path, node.shared_bytes, *own)


def look_at_folder(what: str, path: Path, wanted_bytes: int, *name_parts: str) -> Disk:
    """A folder (or a file's folder) of a tier. Files there count whose names have all `name_parts`."""
    folder = path if path.is_dir() else path.parent
    try:
        present = sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in _entries(folder)
            if all(part in entry.name for part in name_parts) and entry.is_file(follow_symlinks=False)
        )
        _, free_bytes = _space(folder, refuse=True)
        direct = _takes_direct(folder)
    except OSError as error:
        return Disk(what, str(path), wanted_bytes, error=f"{error.strerror or error}")
    return Disk(what, str(path), wanted_bytes, present, free_bytes, _file_system(folder), direct)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return [entry for _, entry in zip(range(_ENTRIES_MAX), found, strict=False)]


def _space(folder: Path, *, refuse: bool = False) -> tuple[int, int]:
    """Size and free bytes of the file system; zeros when there is no such folder, unless that is to be raised."""
    try:
        found = os.statvfs(folder)
    except OSError:
        if refuse:
            raise
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _takes_direct(folder: Path) -> bool:
    """Whether O_DIRECT works here. Raises OSError when no file can be made at all."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
    try:
        os.close(os.open(folder, flags | os.O_TMPFILE, 0o600))
        return True
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
            raise
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".mooncache-doctor-")
    os.close(descriptor)
    try:
        os.close(os.open(name, flags))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.unlink(name)
    return True


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder lies in; "" when the kernel does not list it."""
    real, best, kind = str(folder.resolve()), "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(_MOUNTS_MAX), file, strict=False):
            fields = line.split()
            at = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
            inside = at in ("/", real) or real.startswith(at + "/")
            if at and inside and len(at) >= len(best):
                best, kind = at, fields[2]
    return kind


def _count(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def _certificates(config: Config) -> Iterable[Certificate]:
    if not config.tls.enabled:
        return
    for name, path in (("cert_file", config.tls.cert_file), ("ca_file", config.tls.ca_file)):
        if path is None:
            continue
        setting = f"tls.{name}"
        try:
            begins_s, ends_s = validity_of_file(path)
        except OSError as error:
            yield Certificate(setting, str(path), error=f"cannot be read: {error.strerror}")
        except ValueError as error:
            yield Certificate(setting, str(path), error=str(error))
        else:
            yield Certificate(setting, str(path), begins_s, ends_s)


def _private_files(config: Config) -> Iterable[PrivateFile]:
    secrets = [("cluster.token_file", config.cluster.token_path)]
    if config.tls.enabled and config.tls.key_file is not None:
        secrets.append(("tls.key_file", config.tls.key_file))
    for setting, path in secrets:
        try:
            yield PrivateFile(setting, str(path), path.stat().st_mode & 0o777)
        except FileNotFoundError:
            yield PrivateFile(setting, str(path), error="does not exist")
        except OSError as error:
            yield PrivateFile(setting, str(path), error=f"cannot be read: {error.strerror}")


def _open_binds(config: Config) -> Iterable[str]:
    hosts = {
        "master.host": config.master.host,
        "store_node.host": config.store_node.host,
        "store_node.data_host": config.store_node.data_host,
        "conductor.host": config.conductor.host,
        "gateway.host": config.gateway.host,
    }
    return (f"{name} = {host}" for name, host in hosts.items() if not is_loopback(host))
