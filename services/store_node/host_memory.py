"""How much memory this host, and the groups that the process is in, have left."""

from __future__ import annotations

import os
from pathlib import Path


def memory_left_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the host, and of each memory cgroup that it is in."""
    left = [_available_bytes(root), *_cgroups_left_bytes(root)]
    return max(0, min(left))


def _available_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups_left_bytes(root: Path) -> list[int]:
    """Of each group of cgroup v2 that has a limit: from this process' own to the root that it can see."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    left = []
    for group in [Path(own), *Path(own).parents]:
        folder = root / "sys/fs/cgroup" / str(group).lstrip("/")
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            # the kernel drops these pages of files before it refuses memory
            cache = next(
                (int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")), 0
            )
            if limit != "max":
                left.append(int(limit) - used + cache)
        except (OSError, ValueError, IndexError):
            continue
    return left
