"""Requests that wait for a slice of their tenant's limits, and the calls that they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from mooncache.gateway.core.rate_limit import RateLimit
from mooncache.gateway.core.tenant_slices import FALLBACK_S, TenantSlices
from mooncache.runtime.clock import Clock
from mooncache.runtime.tasks import wait_for_event

WAIT_S: Final = FALLBACK_S + 1.5
"""The longest wait. By then the leases of a former conductor have ended, so one that has just started gives slices;
and without a conductor this gateway has its fair share. Else a slice of another gateway comes within a second."""


class LimitTurns:
    """Who waits, and who is woken."""

    def __init__(self) -> None:
        self._wanted, self._answered = asyncio.Event(), asyncio.Event()

    async def wait(
        self, limits: TenantSlices, tenant: str, asked: Mapping[RateLimit, float], clock: Clock
    ) -> None:
        """Return once the tenant has a slice here, or none can be had soon; `WAIT_S` at most."""
        until_s = clock.now_s() + WAIT_S
        while short := limits.may_wait(tenant, asked, clock.now_s()):
            left_s = until_s - clock.now_s()
            if left_s <= 0:
                return
            limits.wait(tenant, short, 1)
            self._wanted.set()
            try:
                await wait_for_event(self._answered, left_s)
            finally:
                limits.wait(tenant, short, -1)

    async def wanted(self, timeout_s: float) -> None:
        """Return when a request waits, after `timeout_s` at the latest."""
        await wait_for_event(self._wanted, timeout_s)

    def asked(self) -> None:
        """A call begins: it tells of whoever waits now."""
        self._wanted.clear()

    def wake(self) -> None:
        """Slices have changed: all who wait look again."""
        self._answered.set()
        self._answered = asyncio.Event()
