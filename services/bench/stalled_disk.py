"""A disk that stalls for one process alone: the kernel's own limit for the input and output of a control group, at a
byte a second. What the process reads or writes on that disk waits in the kernel until the limit is lifted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mooncache.errors import ConfigInvalid

_ROOT: Final = Path("/sys/fs/cgroup")
_NAME: Final = "mooncache-bench-stall"


class StalledDisk:
    """`stall()` and `go_on()` for the process that was moved into the group. Made by `stalled_disk`."""

    def __init__(self, group: Path, device: str, unified: bool) -> None:
        self._group, self._device, self._unified = group, device, unified

    def stall(self) -> None:
        """From now on nothing of the process reaches the disk, or comes from it."""
        self._limit("rbps=1 wbps=1", "1")

    def go_on(self) -> None:
        """Lift the limit."""
        self._limit("rbps=max wbps=max", "0")

    def _limit(self, unified: str, former: str) -> None:
        if self._unified:
            (self._group / "io.max").write_text(f"{self._device} {unified}")
            return
        for side in ("read", "write"):
            (self._group / f"blkio.throttle.{side}_bps_device").write_text(f"{self._device} {former}")


@contextmanager
def stalled_disk(pid: int, path: Path) -> Iterator[StalledDisk]:
    """Moves the process into a group of its own, and back at the end.

    Raises:
        ConfigInvalid: this takes root, control groups with limits for disks, and a path that lies on a disk.
    """
    unified = (_ROOT / "cgroup.controllers").exists()
    root = _ROOT if unified else _ROOT / "blkio"
    group = root / f"{_NAME}-{pid}"
    try:
        device = _disk_of(path)
        if unified:
            (root / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
    except OSError as error:
        raise ConfigInvalid(
            f"A disk can be stalled here by root alone, with a control group for disks: {error}."
        ) from None
    before = _group_of(pid, unified)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        disk = StalledDisk(group, device, unified)
        try:
            yield disk
        finally:
            disk.go_on()
    except OSError as error:
        raise ConfigInvalid(f"The kernel has no limits for {device}: {error}.") from None
    finally:
        with suppress(ProcessLookupError):
            (root / before.lstrip("/") / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _group_of(pid: int, unified: bool) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if (number == "0") if unified else ("blkio" in controllers.split(",")):
            return name
    return "/"


def _disk_of(path: Path) -> str:
    """major:minor of the whole disk that a file lies on."""
    number = path.stat().st_dev
    below = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    if (below / "partition").exists():
        below = below.parent
    return (below / "dev").read_text().strip()
