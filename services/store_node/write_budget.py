"""What may be written to the disks of the SSD tier, so that they last: a rate, or times a day of the whole disk.

A drive's endurance is given in drive writes per day (DWPD) of the drive, not of the file in it. So the size is that of
the block device, or of the file system that the file lies in; of several disks the smallest counts for all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mooncache.config import StoreNodeSection
from mooncache.errors import ConfigInvalid

_DAY_S: Final = 86_400


def disk_bytes(path: str) -> int:
    """Size of the block device, or of the file system of the folder or file.

    Raises:
        ConfigInvalid: it cannot be found out.
    """
    place = Path(path)
    try:
        if place.exists() and stat.S_ISBLK(place.stat().st_mode):
            handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.lseek(handle, 0, os.SEEK_END)
            finally:
                os.close(handle)
        system = os.statvfs(place if place.exists() else place.parent)
    except OSError as error:
        raise ConfigInvalid(
            f"store_node.ssd_dwpd needs the size of the disk of {path}: {error.strerror}."
        ) from None
    return system.f_blocks * system.f_frsize


def write_bytes_per_s(
    node: StoreNodeSection, paths: Sequence[str], size_of: Callable[[str], int] = disk_bytes
) -> int:
    """What may be written to each disk in a second; 0: without a limit. With two limits the lower one.

    Raises:
        ConfigInvalid: the size of a disk cannot be found out.
    """
    limits = [node.ssd_write_bytes_per_s] if node.ssd_write_bytes_per_s else []
    if node.ssd_dwpd:
        limits.append(max(1, int(min(map(size_of, paths)) * node.ssd_dwpd / _DAY_S)))
    return min(limits, default=0)
