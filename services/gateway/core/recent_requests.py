"""The last requests of each tenant as this gateway saw them end, for the tenant's own page.

They say what the tenant knows anyway, and nothing about instances or other tenants. The tenant that was heard of
longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, NamedTuple

TENANTS_MAX: Final = 512
REQUESTS_MAX: Final = 50


class RecentRequest(NamedTuple):
    """One request that has ended. `code` is OK or the name of an error."""

    request_id: str
    key_id: str
    model: str
    work_class: str
    ended_s: float
    """Unix time."""
    elapsed_ms: float
    code: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class RecentRequests:
    """Rings of requests by tenant."""

    def __init__(self, tenants_max: int = TENANTS_MAX, requests_max: int = REQUESTS_MAX) -> None:
        self._tenants_max, self._requests_max = tenants_max, requests_max
        self._rings: OrderedDict[str, deque[RecentRequest]] = OrderedDict()

    def add(self, tenant: str, request: RecentRequest) -> None:
        """One has ended."""
        ring = self._rings.setdefault(tenant, deque(maxlen=self._requests_max))
        ring.append(request)
        self._rings.move_to_end(tenant)
        if len(self._rings) > self._tenants_max:
            self._rings.popitem(last=False)

    def of(self, tenant: str) -> list[RecentRequest]:
        """A tenant's last requests, the newest first."""
        return list(reversed(self._rings.get(tenant, ())))
