"""Spare copies on this node: blocks that were copied here because many read them, and may go when they are not read.

The store node remembers them, since it outlives the master that ordered them and knows their reads. A copy that was
read since the last look stays; one that was not read for `idle_s` is due. Whether it may go is the master's to say: it
knows the other copies. What it keeps as the last copy is spare no longer. What a node forgets, because it knows too
many or starts again, is evicted like any other block.
Invariant: at most KNOWN_MAX copies are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

KNOWN_MAX: Final = 65_536


@dataclass(slots=True)
class _Spare:
    read_s: float  # when it was last seen to have been read, or was made
    reads: int = 0  # at the last look


class SpareCopies:
    """The spare copies of each tenant. Times are seconds of one monotonic clock."""

    def __init__(self, idle_s: float = 600.0) -> None:
        self.idle_s = idle_s
        self._known: dict[str, dict[bytes, _Spare]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def made(self, tenant: str, keys: Iterable[bytes], now_s: float) -> None:
        """Blocks were copied here to relieve others."""
        known = self._known.setdefault(tenant, {})
        for key in keys:
            if key not in known:
                if self._count >= KNOWN_MAX:
                    break
                self._count += 1
            known[key] = _Spare(now_s)
        self._drop_empty(tenant)

    def tenants(self) -> list[str]:
        """Tenants with spare copies here."""
        return list(self._known)

    def keys(self, tenant: str) -> list[bytes]:
        """The spare copies of a tenant."""
        return list(self._known.get(tenant, ()))

    def looked(
        self, tenant: str, keys: Sequence[bytes], reads: Sequence[int | None], now_s: float
    ) -> list[bytes]:
        """Take in how often blocks have been read since they came here; return those that are due.

        reads: None for a block that is gone.
        """
        due: list[bytes] = []
        known = self._known.get(tenant, {})
        for key, count in zip(keys, reads, strict=True):
            spare = known.get(key)
            if spare is None:
                continue
            if count is None:
                self.forget(tenant, key)
                continue
            if count != spare.reads:
                spare.reads, spare.read_s = count, now_s
            if now_s - spare.read_s >= self.idle_s:
                due.append(key)
        return due

    def forget(self, tenant: str, key: bytes) -> None:
        """It is gone, or a copy like any other."""
        if self._known.get(tenant, {}).pop(key, None) is not None:
            self._count -= 1
            self._drop_empty(tenant)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._count == sum(map(len, self._known.values())) <= KNOWN_MAX, "spare copies are miscounted"
        assert all(self._known.values()), "a tenant without spare copies is remembered"

    def _drop_empty(self, tenant: str) -> None:
        if not self._known.get(tenant, True):
            del self._known[tenant]
