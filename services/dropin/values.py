"""Plain values of the original's API: how to store, what a replica is, a buffer that was read."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

_UINT64_MAX = (1 << 64) - 1


class SoftPinAction(IntEnum):
    """What a put does with a block's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """What an object is; kept for callers that set it, nothing depends on it here."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(IntEnum):
    """State of a replica. The pool lists readable ones only, so it is always COMPLETE."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _UINT64_MAX:
        raise TypeError(f"{name} takes an unsigned 64-bit int; got {value!r}.")
    return value


class ReplicateConfig:
    """How an object is stored. A wrong type is a TypeError when it is set, as in the original.

    `replica_num` copies go to as many nodes; `preferred_segment` (or the first of `preferred_segments`) is the
    node of the first. A pin (`with_hard_pin`, or `soft_pin_action` ENABLE for `soft_pin_ttl_ms`) keeps the object from
    eviction, for a day at most; a put whose hard pin a node refuses stores nothing.
    `group_ids` and `data_type` are accepted and change nothing.
    """

    __slots__ = (
        "_dfs_replica_num",
        "_nof_replica_num",
        "_replica_num",
        "_soft_pin_ttl_ms",
        "data_type",
        "group_ids",
        "prefer_alloc_in_same_node",
        "preferred_nof_segments",
        "preferred_segment",
        "preferred_segments",
        "soft_pin_action",
        "with_hard_pin",
    )

    def __init__(self) -> None:
        self._replica_num = 1
        self._nof_replica_num = 0
        self._dfs_replica_num = 0
        self._soft_pin_ttl_ms: int | None = None
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: list[str] | None = None

    @property
    def replica_num(self) -> int:
        """Copies in the nodes' memory."""
        return self._replica_num

    @replica_num.setter
    def replica_num(self, value: int) -> None:
        self._replica_num = _count("replica_num", value)

    @property
    def nof_replica_num(self) -> int:
        """Copies on NVMe-oF targets: anything but 0 is refused by the put."""
        return self._nof_replica_num

    @nof_replica_num.setter
    def nof_replica_num(self, value: int) -> None:
        self._nof_replica_num = _count("nof_replica_num", value)

    @property
    def dfs_replica_num(self) -> int:
        """Copies on a shared file system: anything but 0 is refused by the put."""
        return self._dfs_replica_num

    @dfs_replica_num.setter
    def dfs_replica_num(self, value: int) -> None:
        self._dfs_replica_num = _count("dfs_replica_num", value)

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        """How long a soft pin lasts, in milliseconds; None is half an hour."""
        return self._soft_pin_ttl_ms

    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, value: int | None) -> None:
        self._soft_pin_ttl_ms = None if value is None else _count("soft_pin_ttl_ms", value)

    @property
    def with_soft_pin(self) -> bool:
        """The name that older versions had for `soft_pin_action` ENABLE."""
        return self.soft_pin_action == SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None:
        self.soft_pin_action = SoftPinAction.ENABLE if value else SoftPinAction.PRESERVE

    def refusal(self) -> str:
        """Why nothing can be stored this way; empty when it can."""
        if self._replica_num < 1:
            return "replica_num must be at least 1: every object lies in some node's memory"
        if self._nof_replica_num or self._dfs_replica_num:
            return (
                "copies on NVMe-oF and shared file systems do not exist here; nodes have disks of their own"
            )
        if self._soft_pin_ttl_ms is not None and self.soft_pin_action != SoftPinAction.ENABLE:
            return "soft_pin_ttl_ms belongs to soft_pin_action ENABLE"
        return ""

    def preferred(self) -> str:
        """Name of the segment that comes first; empty for any."""
        return self.preferred_segment or next(iter(self.preferred_segments), "")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name.lstrip('_')}={getattr(self, name)!r}" for name in self.__slots__)
        return f"ReplicateConfig({shown})"

    __str__ = __repr__


class Descriptor:
    """Where a replica lies: `transport_endpoint` is the node's name. Addresses are never given out: they are 0."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(self, size: int = 0, transport_endpoint: str = "") -> None:
        self.size = size
        self.buffer_address = 0
        self.transport_endpoint = transport_endpoint

    def __repr__(self) -> str:
        return f"<Descriptor size={self.size} transport_endpoint={self.transport_endpoint}>"


class MemoryDescriptor:
    """Of a replica in memory."""

    __slots__ = ("buffer_descriptor",)

    def __init__(self, buffer_descriptor: Descriptor) -> None:
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    """Of a replica on a node's disk; the pool does not say in which file."""

    __slots__ = ("file_path", "object_size")

    def __init__(self, object_size: int) -> None:
        self.file_path = ""
        self.object_size = object_size


class ReplicaDescriptor:
    """One copy of an object."""

    __slots__ = ("_disk", "_size", "node", "status")

    def __init__(self, node: str, size: int, *, on_disk: bool) -> None:
        self.node, self._size, self._disk = node, size, on_disk
        self.status = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Whether it lies in memory."""
        return not self._disk

    def is_disk_replica(self) -> bool:
        """Whether it lies on a shared file system: never here."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether it lies on a disk of its node alone."""
        return self._disk

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where it lies in memory. Raises RuntimeError for a replica on a disk."""
        if self._disk:
            raise RuntimeError("The replica is on a disk.")
        return MemoryDescriptor(Descriptor(self._size, self.node))

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Where it lies on disk. Raises RuntimeError for a replica in memory."""
        if not self._disk:
            raise RuntimeError("The replica is in memory.")
        return DiskDescriptor(self._size)


class BufferHandle(bytearray):
    """An object's bytes, in memory of their own: a buffer with an address."""

    def ptr(self) -> int:
        """Address of the first byte, valid as long as the handle; 0 when it is empty."""
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(self)) if self else 0

    def size(self) -> int:
        """Bytes."""
        return len(self)
