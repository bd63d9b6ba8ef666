"""Whose bytes are where: tenant names, per-tenant sums and optional quotas.

Reports carry tenant ids only (they are hashes); names arrive with heartbeats and with the calls of the
tenants themselves. A name is believed only if its hash is the id. Invariant: at most `names_max` names are
remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mooncache import errors


@dataclass(frozen=True, slots=True)
class TenantRow:
    """What one tenant holds over all nodes and copies."""

    tenant_id: int
    name: str
    used_bytes: int
    block_count: int
    quota_bytes: int | None  # None without a quota


@dataclass(slots=True)
class TenantLedger:
    """Names and quotas. `hash_name` gives the tenant id of a name."""

    hash_name: Callable[[str], int]
    quotas_bytes: Mapping[str, int] = field(default_factory=dict)
    names_max: int = 65536
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.quotas_bytes:
            self.learn(self.hash_name(name), name)

    def learn(self, tenant_id: int, name: str) -> None:
        """Remember the name of a tenant id; a name that does not belong to the id is ignored."""
        if tenant_id in self.names or len(self.names) >= self.names_max:
            return
        if self.hash_name(name) == tenant_id:
            self.names[tenant_id] = name

    def rows(self, usage: Mapping[int, tuple[int, int]]) -> list[TenantRow]:
        """One row for each tenant of `usage` (tenant id -> bytes, blocks), largest first."""
        rows = [self.row(tenant_id, usage) for tenant_id in usage]
        rows.sort(key=lambda row: (-row.used_bytes, row.tenant_id))
        return rows

    def row(self, tenant_id: int, usage: Mapping[int, tuple[int, int]]) -> TenantRow:
        """One tenant's row, zeros when it holds nothing."""
        used_bytes, block_count = usage.get(tenant_id, (0, 0))
        name = self.names.get(tenant_id, "")
        return TenantRow(tenant_id, name, used_bytes, block_count, self.quotas_bytes.get(name))

    def refuse_over_quota(self, tenant_id: int, usage: Mapping[int, tuple[int, int]]) -> None:
        """Raise QuotaExceeded when a tenant already holds its quota.

        The master makes no further copies for it.
        """
        row = self.row(tenant_id, usage)
        if row.quota_bytes is not None and row.used_bytes >= row.quota_bytes:
            raise errors.QuotaExceeded(
                f"tenant {row.name!r} holds {row.used_bytes} bytes of its quota of {row.quota_bytes}; "
                "remove blocks first"
            )
