"""Meters what tenants use: each request that was sent to an instance, once, when it ends.

Counts go into a table in memory, into metrics, and to OpenTelemetry where that is wanted. The duty `flush_usage` writes
the table to where accounts are.
"""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.accounts.core.usage import UsageCounts, UsageKey, UsagePart, UsageTable, WorkClass, hour_of
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.usage_store import UsageStore
from mooncache.gateway.core.top_tenants import TopTenants
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.keyring import Caller
from mooncache.gateway.shell.usage_export import UsageExport
from mooncache.runtime.clock import Clock

_PARTS: Final = 2  # of a flush: one that could not be written before, and what was counted since
_TURN_EVERY: Final = 12  # flushes: a minute


class UsageMeter:
    """The meter of one gateway. `writer` names this process' parts there; no other process has the same."""

    def __init__(
        self,
        place: AccountsPlace,
        writer: str,
        clock: Clock,
        stats: GatewayMetrics,
        export: UsageExport | None = None,
    ) -> None:
        self._place, self._writer, self._clock, self._stats = place, writer, clock, stats
        self.export = export
        self._table, self._top = UsageTable(), TopTenants()
        self._flushing = asyncio.Lock()
        self._flushes = 0
        stats.usage_rows_unwritten.set_function(lambda: len(self._table))
        stats.usage_folded.set_function(lambda: self._table.folded)

    def count(self, caller: Caller, model: str, work_class: WorkClass, counts: UsageCounts) -> None:
        """One request has ended."""
        key = UsageKey(hour_of(self._clock.wall_s()), caller.tenant, caller.key_id, model, work_class)
        self._table.add(key, counts)
        if self.export is not None:
            self.export.count(caller.tenant, model, work_class, counts)
        label = self._top.label(caller.tenant, counts.input_tokens + counts.output_tokens)
        failed, cancelled = counts.failed, counts.cancelled
        outcome = "failed" if failed else "cancelled" if cancelled else "answered"
        self._stats.tenant_requests.labels(label, outcome).inc(counts.requests)
        for kind, tokens in (
            ("computed", counts.computed_tokens),
            ("cached", counts.cached_tokens),
            ("output", counts.output_tokens),
        ):
            self._stats.tenant_tokens.labels(label, kind).inc(tokens)

    async def flush(self) -> None:
        """Write what was counted. Raises ConfigInvalid, AccountsUnavailable; the next call tries again then."""
        self._flushes += 1
        if self._flushes % _TURN_EVERY == 0:
            for tenant in self._top.turn():
                self._stats.forget_tenant(tenant)
        async with self._flushing:
            for _ in range(_PARTS):
                part = self._table.next_part()
                if part is None:
                    break
                await asyncio.to_thread(self._write, part)
                self._table.written(part)

    def _write(self, part: UsagePart) -> None:
        # Opened each time: a file that was moved away or put back is found where it is. Connections are kept.
        with UsageStore(self._place, create=True) as store:
            store.add(self._writer, part, int(self._clock.wall_s()))
