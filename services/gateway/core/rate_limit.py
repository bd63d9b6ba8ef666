"""How much one tenant may ask for: token buckets that fill evenly and hold one minute's worth.

A request is admitted while its tenant's buckets hold something; output tokens are known only afterwards, so the token
bucket may go below zero and the tenant waits until it is filled again (leaky bucket as a meter).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from mooncache.config.serving import GatewaySection

TENANT_COUNT_MAX = 100_000
_MINUTE_S = 60.0


class RateLimit(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"  # requests that run at the same time; counted by the endpoint
    TOKENS_UNDER_WAY = "tokens_under_way"  # of requests that run: of prompts, and those that may be generated
    MONEY = "money"  # in a calendar month


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Of a tenant or of one key: per minute, under way, and money in a month; 0 means no limit."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    requests_under_way: int = 0
    tokens_under_way: int = 0
    money_per_month: float = 0


def default_limits(gateway: GatewaySection) -> RateLimits:
    """A tenant's limits unless something else was set for it, by a gateway's settings."""
    return RateLimits(
        gateway.requests_per_minute,
        gateway.tokens_per_minute,
        gateway.tenant_request_count_max,
        gateway.tenant_token_count_max,
    )


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float
    capacity: float

    def fill(self, capacity: float, now_s: float) -> None:
        self.capacity = capacity
        gained = max(0.0, now_s - self.at_s) * capacity / _MINUTE_S
        self.level, self.at_s = min(capacity, self.level + gained), max(now_s, self.at_s)


@dataclass(frozen=True, slots=True)
class RateVerdict:
    """`limit` says what refused the request for the next `wait_s`; None: it is admitted."""

    wait_s: float = 0.0
    limit: RateLimit | None = None
    remaining_requests: float = 0.0
    remaining_tokens: float = 0.0


class RateLimiter:
    """All tenants' buckets. `now_s` comes from the caller and may not go back."""

    def __init__(self, tenant_count_max: int = TENANT_COUNT_MAX) -> None:
        self._buckets: dict[tuple[str, RateLimit], _Bucket] = {}
        self._count_max = tenant_count_max * 2

    def ask(self, tenant: str, limits: RateLimits, now_s: float, *, counts: bool = True) -> RateVerdict:
        """May the tenant send one more request? Counts it when so, unless it is only a question."""
        requests = self._bucket(tenant, RateLimit.REQUESTS, limits.requests_per_minute, now_s)
        tokens = self._bucket(tenant, RateLimit.TOKENS, limits.tokens_per_minute, now_s)
        if requests is not None and requests.level < min(1.0, limits.requests_per_minute):
            short = min(1.0, limits.requests_per_minute) - requests.level
            return RateVerdict(short * _MINUTE_S / limits.requests_per_minute, RateLimit.REQUESTS)
        if tokens is not None and tokens.level <= 0:
            # One token's worth more than empty, so that a client that comes back on time gets in.
            short = 1.0 - tokens.level
            return RateVerdict(short * _MINUTE_S / limits.tokens_per_minute, RateLimit.TOKENS)
        if requests is not None and counts:
            requests.level -= 1.0
        return RateVerdict(
            remaining_requests=max(0.0, requests.level) if requests else 0.0,
            remaining_tokens=max(0.0, tokens.level) if tokens else 0.0,
        )

    def charge(self, tenant: str, limits: RateLimits, tokens: int, now_s: float) -> None:
        """Count tokens that the tenant used. A limit that has changed since its request came stays changed."""
        known = self._buckets.get((tenant, RateLimit.TOKENS))
        per_minute = limits.tokens_per_minute if known is None else known.capacity
        bucket = self._bucket(tenant, RateLimit.TOKENS, per_minute, now_s)
        if bucket is not None:
            bucket.level -= tokens

    def open_buckets(self, now_s: float) -> Iterator[tuple[str, RateLimit, float, float]]:
        """Tenant, what is counted, limit and level of each bucket that is not full."""
        for (tenant, kind), bucket in self._buckets.items():
            bucket.fill(bucket.capacity, now_s)
            if bucket.level < bucket.capacity:
                yield tenant, kind, bucket.capacity, bucket.level

    def set_level(self, tenant: str, kind: RateLimit, per_minute: float, level: float, now_s: float) -> None:
        """What was counted elsewhere is counted here from now on."""
        bucket = self._bucket(tenant, kind, per_minute, now_s)
        if bucket is not None:
            bucket.level = min(per_minute, level)

    def clear(self) -> None:
        """Forget all buckets."""
        self._buckets.clear()

    def check(self) -> None:
        """Invariant for tests."""
        assert len(self._buckets) <= self._count_max

    def _bucket(self, tenant: str, kind: RateLimit, per_minute: float, now_s: float) -> _Bucket | None:
        if per_minute <= 0:
            return None
        key = (tenant, kind)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._count_max:
                del self._buckets[next(iter(self._buckets))]  # the oldest: most likely full again by now
            bucket = self._buckets[key] = _Bucket(per_minute, now_s, per_minute)
        bucket.fill(per_minute, now_s)
        return bucket
