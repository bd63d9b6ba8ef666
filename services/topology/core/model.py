"""The values that describe a host. Everything that is not known is None or empty, never guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

DMA_BUF: Final = "dma-buf"
_VALUE: Final = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){7}", re.ASCII)


class _KernelWord(StrEnum):
    """A word of the kernel's files. One that is not listed is read as UNKNOWN: enum calls `_missing_` for it."""

    @classmethod
    def _missing_(cls, _value: object) -> Self:
        return cls["UNKNOWN"]


class LinkLayer(_KernelWord):
    """What a port speaks below RDMA, in the kernel's words."""

    ETHERNET = "Ethernet"
    INFINIBAND = "InfiniBand"
    UNKNOWN = "unknown"


class GidKind(_KernelWord):
    """What an address of a port is for."""

    ROCE_V1 = "RoCE v1"
    ROCE_V2 = "RoCE v2"
    IB = "IB"
    UNKNOWN = "unknown"


class AddressFamily(StrEnum):
    """What kind of address a GID holds."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"
    LINK_LOCAL = "link-local"
    IB = "ib"


class PortState(_KernelWord):
    """The state of a port, in the kernel's words."""

    NOP = "NOP"
    DOWN = "DOWN"
    INIT = "INIT"
    ARMED = "ARMED"
    ACTIVE = "ACTIVE"
    ACTIVE_DEFER = "ACTIVE_DEFER"
    UNKNOWN = ""


class GpuVendor(StrEnum):
    """Vendors whose memory can be registered."""

    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, slots=True)
class PciLocation:
    """Where a device sits."""

    address: str
    root: str  # host bridge, such as pci0000:3a
    path: tuple[str, ...]  # bridges from the host bridge down to the device itself, as addresses
    numa_node: int | None = None
    link_gts: float = 0.0  # transfer rate in GT/s, 0 when unknown
    link_gts_max: float = 0.0  # the same at most
    link_lanes: int = 0  # lanes, 0 when unknown
    link_lanes_max: int = 0  # the same at most

    @property
    def bytes_per_s(self) -> float:
        """What the link carries in one direction, line code taken off; 0 when unknown."""
        code = 0.8 if self.link_gts <= 5 else 128 / 130
        return self.link_gts * 1e9 * self.link_lanes * code / 8


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port.

    Raises ValueError for an index of more than 16 bits, and a value that is not eight groups of four digits.
    """

    index: int
    value: str
    kind: GidKind
    netdev: str = ""  # the interface behind it

    def __post_init__(self) -> None:
        if not 0 <= self.index <= 0xFFFF:
            raise ValueError(f"index {self.index!s:.20} of an address is not between 0 and 65535")
        if _VALUE.fullmatch(self.value) is None:
            raise ValueError(f"{self.value!r:.60} is not an address: eight groups of four digits")

    @classmethod
    def read(cls, index: int, text: str, kind: GidKind, netdev: str = "") -> Gid:
        """A GID as people write it, an IPv4 address or eight groups of four digits."""
        if "." not in text:
            return cls(index, text, kind, netdev)
        high, low, *rest = (int(part) for part in text.split("."))
        value = f"{'0000:' * 5}ffff:{high << 8 | low:04x}:{rest[0] << 8 | rest[1]:04x}"
        return cls(index, value, kind, netdev)

    @property
    def packed(self) -> bytes:
        """The 16 bytes on the wire."""
        return bytes.fromhex(self.value.replace(":", ""))

    @property
    def family(self) -> AddressFamily:
        """The kind of address that it holds."""
        if self.kind == GidKind.IB:
            return AddressFamily.IB
        groups = self.value.split(":")
        if groups[:5] == ["0000"] * 5 and groups[5:6] == ["ffff"]:
            return AddressFamily.IPV4
        return AddressFamily.LINK_LOCAL if self.value.startswith("fe80:") else AddressFamily.IPV6

    @property
    def address(self) -> str:
        """The address as people write it."""
        if self.family != AddressFamily.IPV4:
            return self.value
        digits = "".join(self.value.split(":")[6:])
        return ".".join(str(int(digits[at : at + 2], 16)) for at in range(0, 8, 2))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What clients and nodes make of a port: whether they use it, or why not; under which address, and why that one.

    The native engine gives the verdict: for the machine itself by looking, with its configuration; for files from
    elsewhere by its rule about addresses.
    """

    usable: bool
    reason: str = ""
    gid: Gid | None = None
    gid_reason: str = ""
    megabits_per_s: int = 0  # as the device says, 0 when it was not asked


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device."""

    number: int
    state: PortState
    link_layer: LinkLayer
    rate_gbps: float
    physical: str = ""
    lid: int = 0
    mtu_bytes: int = 0  # of the path; on RoCE as the interface allows; 0 when unknown
    netdev: str = ""
    netdev_mtu_bytes: int = 0
    gids: tuple[Gid, ...] = ()
    verdict: Verdict | None = None

    @property
    def active(self) -> bool:
        """Whether packets can go."""
        return self.state == PortState.ACTIVE


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A device of the kernel's RDMA subsystem. pci is None for software devices (rxe, siw)."""

    name: str
    ports: tuple[Port, ...]
    pci: PciLocation | None = None
    numa_node: int | None = None
    firmware: str = ""
    board: str = ""
    uverbs: str = ""
    usable: bool = True
    why_not: str = ""
    gpu_direct: str = ""
    """As the device itself says: DMA_BUF, or another way and why; "" when it was not asked."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, numbered by PCI address (CUDA does so with CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    index: int
    model: str
    pci: PciLocation
    vendor: GpuVendor = GpuVendor.NVIDIA


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Processors and memory that are near to each other."""

    index: int
    cpus: str
    memory_bytes: int
    huge_pages_free: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """One machine at one moment."""

    name: str
    numa: tuple[NumaNode, ...] = ()
    devices: tuple[RdmaDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    memlock_bytes: int | None = None  # None is unlimited
    privileged: bool = False
    verbs_missing: str = ""  # why libibverbs is not usable
    peermem: bool = False
    dmabuf: bool = False
    dmabuf_missing: str = ""
    kernel: str = ""
    rdma_off: str = ""  # why the configuration does without RDMA
    rails_max: int = 4  # ports that one connection uses at most
