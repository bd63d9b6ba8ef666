"""How far two PCI devices are apart, in the words that `nvidia-smi topo` made common.

PIX: one switch between them. PXB: several, none of them the host bridge. PHB: the host bridge. NODE: two host
bridges of one NUMA node. SYS: the link between NUMA nodes. Less is better; GPUDirect is worthwhile up to PXB,
beyond it traffic crosses the processor and many platforms throttle it.
"""

from __future__ import annotations

from enum import IntEnum

from mooncache import _native
from mooncache.topology.core.model import PciLocation


class Distance(IntEnum):
    """Ordered from near to far."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5
    UNKNOWN = 6

    @property
    def words(self) -> str:
        """What it means."""
        return _WORDS[self]


_WORDS = {
    Distance.PIX: "one PCIe switch",
    Distance.PXB: "several PCIe switches",
    Distance.PHB: "the host bridge",
    Distance.NODE: "two host bridges of one NUMA node",
    Distance.SYS: "the link between NUMA nodes",
    Distance.UNKNOWN: "not known",
}


def between(one: PciLocation | None, other: PciLocation | None) -> Distance:
    """The distance of two devices, as the engine sees it; UNKNOWN when one of them is not a PCI device."""
    if one is None or other is None:
        return Distance.UNKNOWN
    return Distance[_native.rdma_distance(_place(one), _place(other))]


def _place(location: PciLocation) -> tuple[str, int]:
    node = -1 if location.numa_node is None else location.numa_node
    return "/".join((location.root, *location.path)), node


def to_memory(device: PciLocation | None, device_numa: int | None, numa_node: int) -> Distance:
    """The distance of a device to the memory of a NUMA node."""
    near = device.numa_node if device is not None and device.numa_node is not None else device_numa
    if near is None:
        return Distance.UNKNOWN
    return Distance.PHB if near == numa_node else Distance.SYS
