"""How many bytes of request bodies may be in memory at once, for the whole gateway and for each tenant, and whose turn
it is to have a large one read.

Bytes are counted as they arrive, so that a client that announces much and sends little holds nothing.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BodyLimit(Enum):
    """Whose bytes are used up."""

    TENANT = auto()
    GATEWAY = auto()


class Budget:
    """Bytes under way. `take` and `give` of one request have to come to the same sum."""

    def __init__(self, bytes_max: int, tenant_bytes_max: int) -> None:
        self._bytes_max, self._tenant_bytes_max = bytes_max, tenant_bytes_max
        self._tenants: dict[str, int] = {}
        self.bytes = 0

    def limit(self, bytes_max: int, tenant_bytes_max: int) -> None:
        """Other limits from now on; what is held stays."""
        self._bytes_max, self._tenant_bytes_max = bytes_max, tenant_bytes_max

    def take(self, tenant: str, size: int) -> BodyLimit | None:
        """Count `size` more bytes. Without room nothing is counted, and the answer says whose bytes are used up."""
        used = self._tenants.get(tenant, 0)
        if used + size > self._tenant_bytes_max:
            return BodyLimit.TENANT
        if self.bytes + size > self._bytes_max:
            return BodyLimit.GATEWAY
        if size:
            self._tenants[tenant] = used + size
            self.bytes += size
        return None

    def give(self, tenant: str, size: int) -> None:
        """They are no longer held."""
        if not size:
            return
        left = self._tenants[tenant] - size
        self.bytes -= size
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]

    def check(self) -> None:
        """Invariant for tests."""
        assert self.bytes == sum(self._tenants.values()) <= self._bytes_max
        assert all(0 < used <= self._tenant_bytes_max for used in self._tenants.values())


class FairQueue(Generic[Item]):
    """Items wait in the order of their tenant; tenants take turns, so that one with many does not delay the others."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0
        self._tenants: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: Item) -> bool:
        """False when the queue is full."""
        if self._count >= self._count_max:
            return False
        self._tenants.setdefault(tenant, deque()).append(item)
        self._count += 1
        return True

    def get(self) -> Item | None:
        """The next one, of the tenant that has waited longest since its last turn."""
        if not self._count:
            return None
        tenant = next(iter(self._tenants))
        items = self._tenants.pop(tenant)
        item = items.popleft()
        self._count -= 1
        if items:
            self._tenants[tenant] = items
        return item

    def remove(self, tenant: str, item: Item) -> None:
        """Take one out, wherever it stands; harmless when it is gone."""
        items = self._tenants.get(tenant)
        if items is None or item not in items:
            return
        items.remove(item)
        self._count -= 1
        if not items:
            del self._tenants[tenant]
