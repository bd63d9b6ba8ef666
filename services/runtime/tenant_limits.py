"""What tenants may have on each node of a pool: a table that nodes keep and that the master spreads.

Idea: every node has the whole table in a file, and the table with the larger version is in force everywhere. A change
through the master has a new version and goes to all nodes; a node that was away brings an older one and gets the newer;
a new master has none and gets the nodes'. So limits outlive every single process, and a file that a person edits on one
node is a change like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from mooncache.auth import check_tenant_name
from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import common_pb2

TENANTS_MAX: Final = 4096
FILE_BYTES_MAX: Final = 4 << 20
REPLICAS_MAX: Final = 16
_NUMBER_MAX: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant on each node; 0 is no limit, or no share. `replicas` is of the pool: copies of each block.

    `encrypted` is 1 when its blocks go to disks encrypted or not at all."""

    memory_quota_bytes: int = 0
    memory_share_bytes: int = 0
    disk_quota_bytes: int = 0
    disk_share_bytes: int = 0
    bytes_per_s: int = 0
    ttl_ms: int = 0
    replicas: int = 0
    encrypted: int = 0

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """Limits of these values. Raises InvalidArgument for unknown names and what is no number of that kind."""
        names = {each.name for each in fields(cls)}
        for name, value in values.items():
            if name not in names:
                raise InvalidArgument(
                    f"{name[:64]!r} is no limit of a tenant; there are {', '.join(sorted(names))}."
                )
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NUMBER_MAX:
                raise InvalidArgument(f"{name} must be a whole number from 0 to {_NUMBER_MAX}.")
        if values.get("encrypted", 0) > 1:
            raise InvalidArgument("encrypted must be 0 or 1.")
        if values.get("replicas", 0) > REPLICAS_MAX:
            raise InvalidArgument(f"replicas must be a whole number from 0 to {REPLICAS_MAX}.")
        return cls(**values)

    def of_node(self) -> dict[str, int]:
        """The amounts that a node keeps to by itself; how many copies there are is the master's to keep."""
        return {name: value for name, value in asdict(self).items() if name not in ("replicas", "encrypted")}


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The limits of all tenants that have some, by name."""

    version: int = 0
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def with_limits(self, tenant: str, limits: TenantLimits, now_ms: int) -> TenantTable:
        """The next table. Raises InvalidArgument for a wrong name and for too many tenants."""
        tenants = dict(self.tenants)
        tenants.pop(tenant, None)
        if limits != TenantLimits():
            tenants[check_tenant_name(tenant)] = limits
        if len(tenants) > TENANTS_MAX:
            raise InvalidArgument(f"More than {TENANTS_MAX} tenants with limits.")
        return TenantTable(max(now_ms, self.version + 1), tenants)

    def to_text(self) -> str:
        """As it is kept in a file."""
        rows = {
            name: {key: value for key, value in asdict(limits).items() if value}
            for name, limits in sorted(self.tenants.items())
        }
        return json.dumps({"version": self.version, "tenants": rows}, indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The table of a file. Raises InvalidArgument."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"The table of tenants is no JSON: {error}.") from None
        rows = found.get("tenants", {}) if isinstance(found, dict) else None
        version = found.get("version", 0) if isinstance(found, dict) else None
        if (
            not isinstance(rows, dict)
            or len(rows) > TENANTS_MAX
            or not all(isinstance(row, dict) for row in rows.values())
        ):
            raise InvalidArgument(f'"tenants" must name up to {TENANTS_MAX} tenants with their limits.')
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= _NUMBER_MAX:
            raise InvalidArgument('"version" must be a whole number.')
        return cls(
            version, {check_tenant_name(name): TenantLimits.checked(row) for name, row in rows.items()}
        )

    def to_message(self) -> common_pb2.TenantTable:
        """As a message."""
        rows = (common_pb2.TenantLimits(tenant=name, **asdict(row)) for name, row in self.tenants.items())
        return common_pb2.TenantTable(version=self.version, tenants=rows)

    @classmethod
    def from_message(cls, message: common_pb2.TenantTable) -> Self:
        """The table of a message. Raises InvalidArgument."""
        if len(message.tenants) > TENANTS_MAX or message.version > _NUMBER_MAX:
            raise InvalidArgument(f"A table has up to {TENANTS_MAX} tenants.")
        return cls(message.version, {row.tenant: limits_of(row) for row in message.tenants})


def limits_of(message: common_pb2.TenantLimits) -> TenantLimits:
    """The limits of a message. Raises InvalidArgument."""
    check_tenant_name(message.tenant)
    return TenantLimits.checked({each.name: getattr(message, each.name) for each in fields(TenantLimits)})
