"""What one host is like at one moment, as far as it decides whether a cluster works there: plain values, no judgement.

A node describes its own host in these words, and `mooncache doctor` describes the one that it runs on. The description
travels as JSON. Who reads an older one finds the defaults below, so each default means "not known" or "nothing wrong".
"""

from __future__ import annotations

import msgspec

from mooncache.topology.core.model import Host

DESCRIPTION_BYTES_MAX = 1 << 20


class Disk(msgspec.Struct, frozen=True):
    """A folder that a tier uses. `wanted_bytes` is its whole size, `present_bytes` what already lies there."""

    what: str
    path: str
    wanted_bytes: int = 0
    present_bytes: int = 0
    free_bytes: int = 0
    file_system: str = ""
    direct: bool = True
    """Whether files can be opened with O_DIRECT."""
    error: str = ""
    """Why it could not be looked at; "" when it could."""


class Certificate(msgspec.Struct, frozen=True):
    """A certificate of the configuration, with its validity as Unix times."""

    setting: str
    path: str
    begins_s: float = 0.0
    ends_s: float = 0.0
    error: str = ""


class PrivateFile(msgspec.Struct, frozen=True):
    """A file that only its owner may read."""

    setting: str
    path: str
    mode: int = 0o600
    error: str = ""


class ArenaFacts(msgspec.Struct, frozen=True):
    """The memory for blocks of a node, or what a node would take with this configuration."""

    size_bytes: int = 0
    kind: str = ""
    page_bytes: int = 0
    why_not_huge: str = ""
    numa_node: int = -1
    """The NUMA node that the settings ask for; -1: any."""


class HostFacts(msgspec.Struct, frozen=True):
    """One host, and the process there that looked."""

    host: Host
    host_id: str = ""
    software_version: str = ""
    wall_s: float = 0.0
    """The host's clock, Unix time."""
    open_files: int = 0
    open_files_max: int = 0
    """The soft limit; 0: not known, or no limit."""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    """Of the process' memory cgroups, the smallest; 0: none."""
    memory_left_bytes: int = -1
    """What the process may still take; -1: not known."""
    shm_bytes: int = 0
    """Size of /dev/shm; 0: not there."""
    shm_free_bytes: int = 0
    io_uring: str = ""
    """Why io_uring cannot be used; "" when it can."""
    arena: ArenaFacts = ArenaFacts()
    disks: tuple[Disk, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    private_files: tuple[PrivateFile, ...] = ()
    tls: bool = False
    open_binds: tuple[str, ...] = ()
    """Settings that name an address beyond loopback."""


def to_json(facts: HostFacts) -> bytes:
    """As a JSON object."""
    return msgspec.json.encode(facts)


def from_json(data: bytes) -> HostFacts:
    """Back from `to_json`. Raises ValueError for anything else: the bytes came over a socket."""
    if len(data) > DESCRIPTION_BYTES_MAX:
        raise ValueError(f"the description of a host has more than {DESCRIPTION_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=HostFacts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not the description of a host: {error}") from None
