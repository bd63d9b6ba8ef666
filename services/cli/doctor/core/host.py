"""Limits, memory, disks and kernel features of a host. Each check sees one host; `subject` is what to call it."""

from __future__ import annotations

from collections.abc import Iterator

from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.reporting.output import human_bytes
from mooncache.topology.core.host_facts import Disk, HostFacts

FILES_WANTED = 4096
FILES_SHARE_MAX = 0.8
HUGE_PAGES_FROM_BYTES = 8 << 30  # smaller arenas gain nothing that could be measured
PAGE_BYTES = 4096
_SHM = "/dev/shm"  # noqa: S108  (a name in sentences)
SHM_WANTED_BYTES = 1 << 30  # vLLM's processes hand tensors to each other there; Docker gives 64 MiB
MEMORY_SHARE_MAX = 0.9
DISK_ROOM = 1.02
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "fuse.sshfs", "9p"})


def descriptors(subject: str, host: HostFacts) -> CheckResult:
    """Every connection and every arena is a descriptor."""
    most, used = host.open_files_max, host.open_files
    if not most:
        return passed("descriptors", subject, "open files are not limited")
    fix = "`ulimit -n 1048576`; systemd: LimitNOFILE=1048576; Docker: --ulimit nofile=1048576"
    if used > most * FILES_SHARE_MAX:
        text = f"{used} of {most} open files are in use; the next connections will be refused"
        return failed("descriptors", subject, text, fix)
    if most < FILES_WANTED:
        text = f"only {most} open files are allowed; a node with many clients needs {FILES_WANTED} or more"
        return warned("descriptors", subject, text, fix)
    return passed("descriptors", subject, f"{used} of {most} open files in use")


def memory(subject: str, host: HostFacts) -> CheckResult:
    """The arena against the host's memory and the limit of the container."""
    if host.arena.kind not in {"", "memory", "tmpfs"} or not host.arena.size_bytes:
        return skipped("memory", subject, "the arena is not in the host's memory")
    size, limit = host.arena.size_bytes, host.memory_limit_bytes or host.memory_bytes
    where = "the container's memory limit" if host.memory_limit_bytes else "the host's memory"
    if not limit:
        return skipped("memory", subject, "the host does not say how much memory it has")
    text = f"the arena of {human_bytes(size)} and {where} of {human_bytes(limit)}"
    fix = f"raise the limit, or set store_node.capacity_bytes to at most {human_bytes(int(limit * 0.8))}"
    if size > limit:
        return failed("memory", subject, f"{text}: the arena cannot fit", fix)
    if size > limit * MEMORY_SHARE_MAX:
        return warned("memory", subject, f"{text}: little is left for anything else", fix)
    return passed("memory", subject, text)


def huge_pages(subject: str, host: HostFacts) -> CheckResult:
    """Pages of 4 KiB cost a large arena address translations."""
    arena = host.arena
    if arena.size_bytes < HUGE_PAGES_FROM_BYTES or not arena.page_bytes:
        return skipped("huge pages", subject, "the arena is small, or its pages are not known")
    if arena.page_bytes > PAGE_BYTES:
        return passed("huge pages", subject, f"pages of {human_bytes(arena.page_bytes)}")
    pages = -(-arena.size_bytes // (2 << 20))
    text = f"{human_bytes(arena.size_bytes)} in pages of 4 KiB: {arena.why_not_huge or 'no huge pages'}"
    return warned("huge pages", subject, text, f"`sysctl vm.nr_hugepages={pages}`, then restart the node")


def io_uring(subject: str, host: HostFacts) -> CheckResult:
    """Disks are read through it; without it by threads."""
    if not host.disks:
        return skipped("io_uring", subject, "no tier on a disk is configured")
    if not host.io_uring:
        return passed("io_uring", subject, "can be used")
    if "io_uring_disabled" in host.io_uring:
        fix = "`sysctl kernel.io_uring_disabled=0`"
    else:
        fix = "Docker: --security-opt seccomp=FILE with io_uring_setup, io_uring_enter, io_uring_register allowed"
    text = f"{host.io_uring}: disks are used through threads, at more processor time for each block"
    return warned("io_uring", subject, text, fix)


def disks(subject: str, host: HostFacts) -> Iterator[CheckResult]:
    """Space, kind of file system and direct I/O of each folder of a tier."""
    if not host.disks:
        yield skipped("disks", subject, "no tier on a disk is configured")
    for disk in host.disks:
        yield _disk(subject, disk)


def _disk(subject: str, disk: Disk) -> CheckResult:
    setting = "store_node.ssd_bytes" if disk.what == "ssd" else "store_node.shared_bytes"
    if disk.error:
        return failed("disks", subject, f"{disk.path}: {disk.error}", "mount the disk, or change its path")
    missing = int((disk.wanted_bytes - disk.present_bytes) * DISK_ROOM)
    if missing > disk.free_bytes:
        text = (
            f"{disk.path} shall hold {human_bytes(disk.wanted_bytes)}, of which {human_bytes(disk.present_bytes)} are "
            f"there, and has {human_bytes(disk.free_bytes)} free"
        )
        return failed("disks", subject, text, f"free space there, or lower {setting}")
    if disk.file_system in MEMORY_FILE_SYSTEMS:
        text = f"{disk.path} is on {disk.file_system}: the tier takes memory and is gone after a reboot"
        return warned("disks", subject, text, "use a folder on a disk (ext4 or xfs)")
    if disk.what == "ssd" and disk.file_system in NETWORK_FILE_SYSTEMS:
        text = f"{disk.path} is on {disk.file_system}: each read crosses the network"
        return warned("disks", subject, text, "use a local disk, or the shared tier (store_node.shared_path)")
    if not disk.direct:
        text = f"{disk.path} ({disk.file_system or 'unknown'}) refuses O_DIRECT: blocks lie in memory twice"
        return warned("disks", subject, text, "use ext4 or xfs on a disk")
    return passed("disks", subject, f"{disk.path}: {human_bytes(disk.free_bytes)} free on {disk.file_system}")


def shared_memory(subject: str, host: HostFacts, *, needed: bool) -> CheckResult:
    """Size of /dev/shm, for engines of several processes."""
    if not needed:
        return skipped(_SHM, subject, "no engine here needs it")
    if host.shm_bytes < SHM_WANTED_BYTES:
        text = f"{_SHM} has {human_bytes(host.shm_bytes)}: vLLM with several GPUs ends with a bus error there"
        fix = "Docker: --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
        return warned(_SHM, subject, text, fix)
    return passed(_SHM, subject, f"{human_bytes(host.shm_free_bytes)} of {human_bytes(host.shm_bytes)} free")


def numa(subject: str, host: HostFacts) -> CheckResult:
    """The NUMA node that the settings bind the arena to."""
    wanted = host.arena.numa_node
    if wanted < 0:
        return skipped("NUMA", subject, "the arena is bound to no NUMA node")
    nodes = {node.index: node for node in host.host.numa}
    if wanted not in nodes:
        text = f"store_node.numa_node is {wanted}, and the host has {', '.join(map(str, sorted(nodes))) or 'none'}"
        return failed("NUMA", subject, text, "set it to a NUMA node of `mooncache topology`, or to -1")
    size = nodes[wanted].memory_bytes
    if size and host.arena.size_bytes > size:
        arena = human_bytes(host.arena.size_bytes)
        text = f"NUMA node {wanted} has {human_bytes(size)}, less than the arena of {arena}"
        return failed(
            "NUMA", subject, text, "run one node on each NUMA node, or set store_node.numa_node to -1"
        )
    return passed("NUMA", subject, f"bound to NUMA node {wanted}")
