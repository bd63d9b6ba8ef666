"""The tenants of a node: the table of their limits, in a file and in the native server, and what they have done.

The file may be edited while the node runs: what is read there counts as the newest table, and reaches the other nodes
through the master. A file that cannot be read changes nothing, and the log says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from mooncache.auth import tenant_id
from mooncache.errors import InvalidArgument, MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tenant_limits import FILE_BYTES_MAX, TenantLimits, TenantTable
from mooncache.store_node.tenant_keys import TenantKeys
from mooncache.whole_file import AS_UMASK_SAYS, write_whole

TEND_SLOTS: Final = 1 << 20
"""Slots that one look for blocks beyond their TTL takes in."""
OTHERS: Final = "others"

log = get_logger(__name__)


class TenantCore(Protocol):
    """The part of the native StoreServer that this needs."""

    def set_limits(
        self,
        tenant: str,
        *,
        memory_quota_bytes: int = 0,
        memory_share_bytes: int = 0,
        disk_quota_bytes: int = 0,
        disk_share_bytes: int = 0,
        bytes_per_s: int = 0,
        ttl_ms: int = 0,
        encrypted: bool = False,
    ) -> None: ...

    def tend_tenants(self, max_slots: int, /) -> dict[int, dict[str, int]]: ...
    def tenants(self) -> dict[int, str]: ...
    def purge(self, tenant_id: int, cursor: int, /) -> dict[str, int]: ...
    def set_keys(self, tenant: str, keys: list[bytes]) -> None: ...


class NodeTenants:
    """The table in force and the last figures. Used by one event loop."""

    def __init__(
        self, core: TenantCore, path: Path, wall_ms: Callable[[], int], keys: TenantKeys | None = None
    ) -> None:
        self.core = core
        self.keys = keys
        self._path = path
        self._wall_ms = wall_ms
        self._seen: tuple[int, int] | None = None  # of the file: time and size
        self.table = TenantTable()
        self.figures: dict[str, dict[str, int]] = {}
        self.wanted = False
        """The master wants the table."""

    def take(self, table: TenantTable) -> bool:
        """A newer table comes into force and into the file; an older one is ignored, with False."""
        if table.version <= self.table.version:
            return False
        self._enforce(table)
        try:
            write_whole(self._path, table.to_text(), mode=AS_UMASK_SAYS)
            self._seen = self._look()
        except OSError as error:
            log.warning(Event.NODE_TENANTS_NOT_KEPT, reason=str(error.strerror))
        return True

    def read_file(self) -> None:
        """Take over what a person, or another node of this host, has written."""
        seen = self._look()
        if seen is None or seen == self._seen:
            return
        self._seen = seen
        try:
            if seen[1] > FILE_BYTES_MAX:
                raise InvalidArgument(f"it has more than {FILE_BYTES_MAX} bytes")
            found = TenantTable.from_text(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, MooncacheError) as error:
            log.warning(Event.NODE_TENANTS_NOT_READ, path=str(self._path), reason=str(error))
            return
        if found.version <= self.table.version and found.tenants != self.table.tenants:
            edited_ms = min(seen[0] // 1_000_000, self._wall_ms())
            found = TenantTable(max(edited_ms, self.table.version + 1), found.tenants)
        if found.version > self.table.version:
            self._enforce(found)

    def tend(self) -> None:
        """Ask the native server for figures; it ends blocks that are too old. Takes a moment: call it in a thread."""
        if self.keys is not None:
            self.keys.refresh(self.core)
        names = self.core.tenants()
        found: dict[str, dict[str, int]] = {}
        for number, figures in self.core.tend_tenants(TEND_SLOTS).items():
            name = names.get(number, "")
            known = found.setdefault(name, dict.fromkeys(figures, 0))
            for key, value in figures.items():
                known[key] += value
        self.figures = found

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _enforce(self, table: TenantTable) -> None:
        for name in self.table.tenants.keys() - table.tenants.keys():
            self.core.set_limits(name)
        for name, limits in table.tenants.items():
            if self.table.tenants.get(name, TenantLimits()) != limits:
                self.core.set_limits(name, **limits.of_node(), encrypted=bool(limits.encrypted))
        self.table = table
        log.info(Event.NODE_TENANTS_SET, version=table.version, tenants=len(table.tenants))

    def erase_keys(self, tenant: str) -> list[str]:
        """Delete the keys of a tenant; the names of those that were here. Raises ConfigInvalid."""
        return [] if self.keys is None else self.keys.erase(self.core, tenant)

    def purge_page(self, tenant: str, cursor: int) -> dict[str, int]:
        """One page of a purge, as the native server says."""
        return self.core.purge(tenant_id(tenant), cursor)


def encrypted_tenants(path: Path) -> list[int]:
    """Ids of the tenants whose blocks have to be encrypted, by the table in a file; none when there is none."""
    try:
        table = TenantTable.from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, MooncacheError):
        return []  # read_file() says what is wrong with it
    return [tenant_id(name) for name, limits in table.tenants.items() if limits.encrypted]


def largest(figures: Mapping[str, Mapping[str, int]], count: int) -> dict[str, dict[str, int]]:
    """The `count` tenants that hold most, and the sums of the others under OTHERS."""
    ranked = sorted(
        (name for name in figures if name),
        key=lambda name: (-(figures[name]["bytes"] + figures[name]["disk_bytes"]), name),
    )
    found = {name: dict(figures[name]) for name in ranked[:count]}
    others: dict[str, int] = {}
    for name in [*ranked[count:], *([""] if "" in figures else [])]:
        for key, value in figures[name].items():
            others[key] = others.get(key, 0) + value
    if others:
        found[OTHERS] = others
    return found
