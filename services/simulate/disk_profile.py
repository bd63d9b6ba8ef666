"""What the SSD tier reaches on one machine's disks: measured by `mooncache bench tiers --calibrate`, read by `simulate`
and `plan`.

Idea: a read costs a fixed time and a time for each byte, so the rates at two block sizes say the rate at any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from mooncache.config.small_files import nearest, read_toml
from mooncache.errors import ProfileInvalid
from mooncache.simulate.cluster import ClusterSpec

LARGE_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 64 << 10
_DISKS_MAX: Final = 64
_GB_PER_S_MAX: Final = 1_000.0


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """Rates of the SSD tier on one disk, checksums on, in GB/s."""

    read_gb_per_s: float  # blocks of 1 MiB
    small_read_gb_per_s: float  # blocks of 64 KiB
    write_gb_per_s: float  # blocks of 1 MiB
    disks: int = 1  # of this kind in one machine

    def check(self, where: str) -> DiskProfile:
        """The profile itself. Raises PROFILE_INVALID with the field and its value."""
        for name in ("read_gb_per_s", "small_read_gb_per_s", "write_gb_per_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ProfileInvalid(f"{where}: {name} is {value!r}, not a number")
            if not 0 < value <= _GB_PER_S_MAX:
                raise ProfileInvalid(
                    f"{where}: {name} is {value} GB/s; it is above 0, at most {_GB_PER_S_MAX:g}"
                )
        if isinstance(self.disks, bool) or not isinstance(self.disks, int):
            raise ProfileInvalid(f"{where}: disks is {self.disks!r}, not a whole number")
        if not 1 <= self.disks <= _DISKS_MAX:
            raise ProfileInvalid(f"{where}: disks is {self.disks}; it is 1 to {_DISKS_MAX}")
        return self

    def machine_read_gb_per_s(self, block_bytes: float) -> float:
        """What all disks of a machine read together, GB/s, in blocks of this size.

        Never above the rate of 1 MiB blocks, which is what was measured.
        """
        large_s, small_s = LARGE_BYTES / self.read_gb_per_s, SMALL_BYTES / self.small_read_gb_per_s
        byte_s = max((large_s - small_s) / (LARGE_BYTES - SMALL_BYTES), 0.0)
        fixed_s = max(small_s - SMALL_BYTES * byte_s, 0.0)
        rate = block_bytes / (fixed_s + block_bytes * byte_s) if fixed_s or byte_s else math.inf
        return self.disks * min(rate, max(self.read_gb_per_s, self.small_read_gb_per_s))

    @property
    def machine_write_gb_per_s(self) -> float:
        """What all disks of a machine write together, GB/s."""
        return self.disks * self.write_gb_per_s

    def to_toml(self, *remarks: str) -> str:
        """The file that `read` takes back, with remarks at its head."""
        lines = [f"# {remark}" for remark in remarks]
        lines.append(f"disks = {self.disks}  # of this kind in one machine")
        for name, what in (
            ("read_gb_per_s", "blocks of 1 MiB"),
            ("small_read_gb_per_s", "blocks of 64 KiB"),
            ("write_gb_per_s", "blocks of 1 MiB"),
        ):
            lines.append(f"{name} = {getattr(self, name):.4g}  # {what}")
        return "\n".join(lines) + "\n"


def read(path: Path) -> DiskProfile:
    """The profile in a file. Raises PROFILE_INVALID with the field that is wrong."""
    where = path.expanduser()
    table = read_toml(where, "disk profile", ProfileInvalid)
    known = [field.name for field in fields(DiskProfile)]
    for name in table:
        if name not in known:
            raise ProfileInvalid(f"{where}: there is no field {name}; {nearest(name, known)}")
    for name in known[:3]:
        if name not in table:
            raise ProfileInvalid(f"{where}: {name} is missing")
    return DiskProfile(**table).check(str(where))


def with_disks(spec: ClusterSpec, disk: DiskProfile) -> ClusterSpec:
    """The cluster with the rates of these disks in each node. A write limit that is lower stays.

    Raises PROFILE_INVALID when no group of the cluster has a disk.
    """
    if not any(group.ssd_blocks for group in spec.instances):
        raise ProfileInvalid("The cluster has no disks: set ssd_blocks of its [[instances]].")
    groups = []
    for group in spec.instances:
        block_bytes = spec.block_tokens * spec.profile_of(group).kv_bytes_per_token
        limits = [disk.machine_write_gb_per_s]
        if group.ssd_write_gbytes_per_s:
            limits.append(group.ssd_write_gbytes_per_s)
        groups.append(
            replace(
                group,
                ssd_read_gbytes_per_s=disk.machine_read_gb_per_s(block_bytes),
                ssd_write_gbytes_per_s=min(limits),
            )
        )
    return replace(spec, instances=tuple(groups))
