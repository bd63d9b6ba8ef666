"""What this gateway may use of each tenant's limits: all of it while it is alone, else the slice that it has leased.

Limits are those of a tenant, or of one key beside its tenant's: a tenant is named here by its holder (core/holders.py).

The conductor divides each limit over the gateways (conductor/core/limit_book.py). A slice is what may be under way
here, or what may still be spent. A tenant that is new here has none: its first request waits for the next answer of
the conductor, and so does one that finds the slice used up while there is something left of the limit. A slice that is
not used is given back after a second.

A lease ends by itself. When the conductor has not answered for `FALLBACK_S`, all slices of all gateways have ended, and
each gateway uses its fair share: the limit over the gateways that there were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncache.accounts.core.spending import LedgerRow
from mooncache.gateway.core.holders import of_key
from mooncache.gateway.core.limit_shares import (
    UNKNOWN_RUN,
    HeldAmount,
    LeaseAnswer,
    LimitKey,
    Share,
    ShareUse,
)
from mooncache.gateway.core.rate_limit import RateLimit, RateLimiter, RateLimits, RateVerdict
from mooncache.gateway.core.spending import Spending

LEASE_S: Final = 3.0
"""How long a gateway that was alone goes on so when it hears of another one; the conductor waits for that."""
CALL_TIMEOUT_S: Final = 0.5
FALLBACK_S: Final = 3.5
"""By then all leases have ended: `LEASE_S` after a call that took `CALL_TIMEOUT_S`."""
INTERVAL_S: Final = 0.25
SHORT_INTERVAL_S: Final = 0.05
"""Between calls while requests wait."""
USES_MAX: Final = 1024
_USES_PER_S: Final = 2000.0
_INTERVAL_MAX_S: Final = 1.0
SHARES_MAX: Final = 200_000
_IDLE_S: Final = 1.0
_MINUTE_S: Final = 60.0
_MONEY_WANTED: Final = 1e-3  # of a budget: what requests that wait are taken to want, each
_RETRY_S: Final = 1.0
PER_MINUTE: Final = (RateLimit.REQUESTS, RateLimit.TOKENS)
_ALONE_RUN: Final = -1  # what is left was counted here


@dataclass(slots=True)
class TenantSlices:
    """All tenants' limits at one gateway. Times are seconds of one monotonic clock.

    Attributes: `running` requests of each holder under way; `gateway_count` as the conductor said last, 0 before;
    `falls_back` while limits are fair shares because the conductor does not answer; `spending` is the month's money.
    """

    running: dict[str, int] = field(default_factory=dict)
    spending: Spending = field(default_factory=Spending)
    _held: dict[LimitKey, HeldAmount] = field(default_factory=dict)
    gateway_count: int = 0
    falls_back: bool = False
    _alone: RateLimiter = field(default_factory=RateLimiter)
    _shares: dict[LimitKey, Share] = field(default_factory=dict)
    _active: dict[LimitKey, Share] = field(default_factory=dict)
    _run: int = 0  # of the conductor's book that answered last
    _list_run: int = 0
    _lost_s: float | None = None
    _whole_due: bool = False
    _heard_run: int = 0
    _heard_budgets: set[str] = field(default_factory=set)

    @property
    def is_shared(self) -> bool:
        """Whether there are other gateways."""
        return self.gateway_count > 1

    @property
    def wants_answer(self) -> bool:
        """Whether requests wait for a slice, or the conductor for what this gateway has."""
        return self._whole_due or any(share.waiting for share in self._active.values())

    @property
    def interval_s(self) -> float:
        """Between two reports: longer when many tenants are active, so that the conductor's work stays the same."""
        return min(_INTERVAL_MAX_S, max(INTERVAL_S, len(self._active) / _USES_PER_S))

    # --- of requests
    # -------------------------------------------------------------------------------------------

    def may_wait(self, tenant: str, limits: Mapping[RateLimit, float], now_s: float) -> list[RateLimit]:
        """The limits of which a request has no slice here, but may get one soon; empty: it is answered now."""
        if not self.is_shared:
            return []
        short = []
        for kind, limit in limits.items():
            share = self._share(tenant, kind, limit, now_s)
            if self._room(tenant, kind, share, now_s) >= _needed(kind, limit):
                continue
            left, waiting = self._left(tenant, kind, share, now_s), share.waiting * _each(kind, limit)
            if self.falls_back or (left is not None and left - waiting < _needed(kind, limit)):
                return []
            if waiting >= limit:
                return []
            short.append(kind)
        return short

    def wait(self, tenant: str, kinds: Sequence[RateLimit], change: int) -> None:
        """A request begins to wait for slices (`change` 1), or ends it (-1)."""
        for kind in kinds:
            share = self._shares.get((tenant, kind))
            if share is not None:
                share.waiting = max(0.0, share.waiting + change)

    def running_max(self, tenant: str, limit: int, now_s: float) -> int:
        """How many requests of the tenant may run here."""
        if not self.is_shared:
            return limit
        share = self._share(tenant, RateLimit.CONCURRENCY, limit, now_s)
        return min(limit, int(self._allowed(tenant, RateLimit.CONCURRENCY, share, now_s)))

    def hold(self, tenant: str, kind: RateLimit, limit: float, amount: float, now_s: float) -> bool:
        """Count what a request that begins has under way, when there is room for any of it; False: there is none.

        So the last request that is let in may be larger than the room, and no request is always too large.
        """
        key = tenant, kind
        if self.is_shared:
            share = self._share(tenant, kind, limit, now_s)
            room = min(limit, self._allowed(tenant, kind, share, now_s)) - self._under_way(tenant, kind)
        else:
            spent = self.spending.reported(tenant) if kind is RateLimit.MONEY else 0.0
            room = limit - spent - self._under_way(tenant, kind)
        if room < _needed(kind, limit):
            self.refuse(tenant, kind)
            return False
        held = self._held.setdefault(key, HeldAmount())
        held.limit, held.amount, held.requests = limit, held.amount + amount, held.requests + 1
        return True

    def release(self, tenant: str, kind: RateLimit, amount: float) -> None:
        """What `hold` counted is under way no longer."""
        held = self._held[tenant, kind]
        held.amount, held.requests = held.amount - amount, held.requests - 1
        if not held.requests:  # whole again, whatever sums of fractions are
            del self._held[tenant, kind]

    def under_way(self, tenant: str, kind: RateLimit) -> float:
        """How much of it the holder has under way at this gateway."""
        return self._under_way(tenant, kind)

    def refuse(self, tenant: str, kind: RateLimit) -> None:
        """A request was refused because of this limit; the next slice is larger for it."""
        share = self._shares.get((tenant, kind))
        if share is not None:
            share.refused += 1

    def ask(self, tenant: str, limits: RateLimits, now_s: float, *, counts: bool = True) -> RateVerdict:
        """May the holder send one more request? Counts it when so, unless it is only a question."""
        if not self.is_shared:
            return self._alone.ask(tenant, limits, now_s, counts=counts)
        shares = {kind: self._share(tenant, kind, limit, now_s) for kind, limit in rates_of(limits).items()}
        for kind, share in shares.items():
            if self._room(tenant, kind, share, now_s) < _needed(kind, share.limit):
                self.refuse(tenant, kind)
                return RateVerdict(self._wait_s(tenant, kind, share, now_s), kind)
        if RateLimit.REQUESTS in shares and counts:
            _spend(shares[RateLimit.REQUESTS], 1.0)
        left = {kind: self._left(tenant, kind, share, now_s) for kind, share in shares.items()}
        known = {kind: shares[kind].slice if amount is None else amount for kind, amount in left.items()}
        return RateVerdict(
            remaining_requests=max(0.0, known.get(RateLimit.REQUESTS, 0.0)),
            remaining_tokens=max(0.0, known.get(RateLimit.TOKENS, 0.0)),
        )

    def charge(self, tenant: str, limits: RateLimits, tokens: int, now_s: float) -> None:
        """Count tokens that the tenant used."""
        if not self.is_shared:
            self._alone.charge(tenant, limits, tokens, now_s)
        elif limits.tokens_per_minute > 0:
            known = self._shares.get(
                (tenant, RateLimit.TOKENS)
            )  # its limit may have changed since the request came
            limit = limits.tokens_per_minute if known is None else known.limit
            _spend(self._share(tenant, RateLimit.TOKENS, limit, now_s), tokens)

    def refusal(self, tenant: str, verdict: RateVerdict, limits: RateLimits) -> str:
        """The message of a refusal for a limit per minute."""
        again = f"Please try again in {verdict.wait_s:.1f} s."
        whose = of_key(tenant)
        if not self.is_shared or verdict.limit is None:
            return f"Rate limit reached: {verdict.limit} per minute{whose}. {again}"
        limit = rates_of(limits)[verdict.limit]
        what = f"{limit:g} {verdict.limit} per minute{whose} over all gateways"
        return f"Rate limit reached: {what}{self._divided(limit / self.gateway_count)}. {again}"

    def full(self, tenant: str, limit: int, now_s: float) -> str:
        """The message of a refusal when too many requests run."""
        again = "Send the next when one has ended."
        whose = of_key(tenant)
        if not self.is_shared:
            return f"{limit} of your requests{whose} are running, which is the limit. {again}"
        most = self.running_max(tenant, limit, now_s)
        what = f"{limit} of your requests{whose} may run at the same time over all gateways"
        return f"{what}, and {most} of them at this gateway now{self._divided(most)}. {again}"

    def no_room(self, tenant: str, kind: RateLimit, limit: float) -> str:
        """The message of a refusal when too many tokens are under way."""
        again = "Send the next when a request has ended; a smaller max_tokens leaves room for more requests."
        what = f"{limit:g} tokens of your requests{of_key(tenant)} may be under way"
        if not self.is_shared:
            return f"{what}, and {self._under_way(tenant, kind):g} are. {again}"
        divided = self._divided(limit / self.gateway_count)
        return (
            f"{what} over all gateways, and there is no room for more at this gateway now{divided}. {again}"
        )

    def _divided(self, share: float) -> str:
        if not self.falls_back:
            return ""
        return f"; the conductor does not answer, so this gateway has its share of {share:g}"

    # --- of the duty
    # --------------------------------------------------------------------------------------------

    def hear_count(
        self, count: int, list_run: int, running_limit: Callable[[str], int], now_s: float
    ) -> None:
        """The conductor knows so many gateways; 0: it does not know yet.

        list_run: of the conductor's process. running_limit: how many requests of a holder may run; 0: no limit.
        """
        if list_run != self._list_run:
            self._list_run = list_run
            self._hear_run(UNKNOWN_RUN)
        if not count or count == self.gateway_count:
            return
        was_shared, self.gateway_count = self.is_shared, count
        if self.is_shared and not was_shared:
            self._begin_to_share(running_limit, now_s)
        elif was_shared and not self.is_shared:
            self._end_to_share(now_s)

    def conductor_is(self, present: bool, now_s: float) -> bool:
        """Whether the conductor answers. True when limits have become fair shares, or ceased to be, by that."""
        if present:
            self._lost_s = None
        elif self._lost_s is None:
            self._lost_s = now_s
        before, self.falls_back = (
            self.falls_back,
            self.is_shared and self._lost_s is not None and now_s - self._lost_s >= FALLBACK_S,
        )
        return before != self.falls_back

    def tell_spending(self, budgets: Mapping[str, float], now_s: float) -> None:
        """Have a conductor that is new hear what was spent of all budgets, and any one of a budget that is new."""
        if not self.is_shared or not self._run:
            return
        if self._heard_run != self._run:
            self._heard_run, self._heard_budgets = self._run, set()
        for holder in budgets.keys() - self._heard_budgets:
            self._heard_budgets.add(holder)
            if self.spending.total(holder) > 0:
                self._share(holder, RateLimit.MONEY, budgets[holder], now_s)

    def begin_month(self, month: int, rows: Mapping[str, LedgerRow]) -> None:
        """Money is counted anew, or was read from the file. Slices are of the month that they were given in."""
        self.spending.begin(month, rows)
        for key in [key for key in self._shares if key[1] is RateLimit.MONEY]:
            del self._shares[key]
            self._active.pop(key, None)
        self._heard_budgets = set()

    def has_reports(self) -> bool:
        """Whether the conductor has to hear of something."""
        return self.is_shared and (self._whole_due or bool(self._active))

    def reports(self, now_s: float) -> Iterator[tuple[list[ShareUse], bool]]:
        """What is in use here, in parts that fit into a call each; and whether it is all with this part.

        Slices of tenants that ask for nothing are no longer used from now on.
        """
        keys = list(self._active)
        for at in range(0, max(1, len(keys)), USES_MAX):
            part = [key for key in keys[at : at + USES_MAX] if key in self._active]
            yield [self._use(key, self._active[key], now_s) for key in part], at + USES_MAX >= len(keys)

    def answered(
        self, uses: Sequence[ShareUse], answer: LeaseAnswer, sent_s: float, *, is_whole: bool
    ) -> None:
        """The conductor's answer to a part of a report that was sent at that moment."""
        if answer.run != self._run:
            self._hear_run(answer.run)
        elif is_whole:
            self._whole_due = False
        for use, (granted, left) in zip(uses, answer.leases, strict=False):
            share = self._shares.get((use.tenant, use.kind))
            if share is None:
                continue
            spent = share.used - use.used if use.kind in PER_MINUTE else 0.0
            if _is_given_back(use) and share.asked_s < sent_s:
                share.is_resting = True
                self._active.pop((use.tenant, use.kind), None)
                if use.kind not in PER_MINUTE:
                    share.left = None  # others change it unheard
                    continue
            elif not _is_given_back(use):
                share.slice, share.until_s, share.filled_s = granted - spent, sent_s + answer.lease_s, None
            if use.kind in PER_MINUTE:
                share.used_before = use.used
            if share.left is None or use.left is not None or share.run == answer.run:
                share.left, share.left_s, share.left_used, share.run = left, sent_s, use.used, answer.run

    def forget_idle(self, now_s: float) -> None:
        """Forget what was given back a minute ago: those buckets are full again."""
        while self._shares:
            key, share = next(iter(self._shares.items()))
            if not share.is_resting or now_s - share.asked_s < _MINUTE_S:
                break
            del self._shares[key]

    def check(self) -> None:
        """Invariants for tests."""
        assert all(self._shares[key] is share for key, share in self._active.items())
        assert all(not share.is_resting for share in self._active.values())
        assert all(count > 0 for count in self.running.values()), "a tenant's count is not positive"
        assert all(held.requests > 0 for held in self._held.values()), "something is held by no request"
        self._alone.check()

    # --- shares
    # -------------------------------------------------------------------------------------------------

    def _share(self, tenant: str, kind: RateLimit, limit: float, now_s: float) -> Share:
        key = tenant, kind
        share = self._shares.pop(key, None) or Share(limit)
        self._shares[key] = self._active[key] = share  # the one that was asked for last is the last
        share.limit, share.asked_s, share.is_resting = limit, now_s, False
        while len(self._shares) > SHARES_MAX:
            oldest = next(iter(self._shares))
            del self._shares[oldest]
            self._active.pop(oldest, None)
        return share

    def _under_way(self, tenant: str, kind: RateLimit) -> float:
        if kind is RateLimit.CONCURRENCY:
            return self.running.get(tenant, 0)
        held = self._held.get((tenant, kind))
        amount = 0.0 if held is None else held.amount
        return amount + self.spending.unreported(tenant) if kind is RateLimit.MONEY else amount

    def _allowed(self, tenant: str, kind: RateLimit, share: Share, now_s: float) -> float:
        """The most that may be under way, or what may still be spent."""
        if now_s < share.until_s:
            return share.slice
        fair = share.limit / self.gateway_count
        if kind is RateLimit.MONEY:
            fair = max(0.0, share.limit - self.spending.reported(tenant)) / self.gateway_count
            return fair if self.falls_back else min(share.slice, fair)
        if kind not in PER_MINUTE:
            return max(1.0, math.floor(fair)) if self.falls_back else min(share.slice, math.floor(fair))
        if not self.falls_back:
            return share.slice
        if share.filled_s is None:
            share.filled_s = now_s
            share.slice = fair if share.left is None else min(share.slice, fair)
        passed_s, share.filled_s = max(0.0, now_s - share.filled_s), now_s
        share.slice = min(fair, share.slice + passed_s * fair / _MINUTE_S)
        return share.slice

    def _room(self, tenant: str, kind: RateLimit, share: Share, now_s: float) -> float:
        return self._allowed(tenant, kind, share, now_s) - self._under_way(tenant, kind)

    def _left(self, tenant: str, kind: RateLimit, share: Share, now_s: float) -> float | None:
        """What is left of the whole limit, as far as it is known here."""
        if share.left is None:
            return None
        if kind not in PER_MINUTE:
            return share.left - (self._under_way(tenant, kind) - share.left_used)
        filled = (now_s - share.left_s) * share.limit / _MINUTE_S
        return min(share.limit, share.left + filled) - (share.used - share.left_used)

    def _wait_s(self, tenant: str, kind: RateLimit, share: Share, now_s: float) -> float:
        needed = 1.0 if kind is RateLimit.TOKENS else _needed(kind, share.limit)
        if self.falls_back:
            short, per_minute = needed - share.slice, share.limit / self.gateway_count
        else:
            left = self._left(tenant, kind, share, now_s)
            short, per_minute = (0.0 if left is None else needed - left), share.limit
        return max(_RETRY_S, short * _MINUTE_S / per_minute)

    def _use(self, key: LimitKey, share: Share, now_s: float) -> ShareUse:
        tenant, kind = key
        is_idle = not (self.running.get(tenant) or share.waiting or share.refused or (key in self._held))
        if is_idle and now_s - share.asked_s >= _IDLE_S:
            share.slice, share.until_s = min(0.0, share.slice), -math.inf
        tells = kind in PER_MINUTE and share.run != self._run
        wanted, share.refused = (share.waiting + share.refused) * _each(kind, share.limit), 0.0
        is_money = kind is RateLimit.MONEY
        row = self.spending.row(tenant) if is_money else LedgerRow()
        used = share.used if kind in PER_MINUTE else self._under_way(tenant, kind)
        if is_money:
            used = max(
                0.0, self._under_way(tenant, kind) - self.spending.unreported(tenant)
            ) + self.spending.unwritten(tenant)
        return ShareUse(
            tenant,
            kind,
            share.limit,
            max(0.0, self._allowed(tenant, kind, share, now_s)),
            used,
            share.used_before,
            wanted,
            self._left(tenant, kind, share, now_s) if tells else None,
            *((self.spending.month, self.spending.ledger, row.own, row.own + row.others) if is_money else ()),
        )

    def _hear_run(self, run: int) -> None:
        """Another conductor leads, which has to hear of everything, also of what was given back."""
        self._run, self._whole_due = run, True
        for key, share in self._shares.items():
            if share.is_resting and key[1] in PER_MINUTE:
                share.is_resting, self._active[key] = False, share

    def _begin_to_share(self, running_limit: Callable[[str], int], now_s: float) -> None:
        """All that was this gateway's is its slice until the conductor has heard of it."""
        self._whole_due = True
        for tenant in self.running:
            if limit := running_limit(tenant):
                share = self._share(tenant, RateLimit.CONCURRENCY, limit, now_s)
                share.slice, share.until_s = limit, now_s + LEASE_S
        for (tenant, kind), held in self._held.items():
            share = self._share(tenant, kind, held.limit, now_s)
            share.slice, share.until_s = held.limit, now_s + LEASE_S
        for tenant, kind, per_minute, level in self._alone.open_buckets(now_s):
            share = self._share(tenant, kind, per_minute, now_s)
            share.slice, share.until_s = level, now_s + LEASE_S
            share.left, share.left_s, share.run = level, now_s, _ALONE_RUN
        self._alone.clear()

    def _end_to_share(self, now_s: float) -> None:
        for (tenant, kind), share in self._shares.items():
            left = self._left(tenant, kind, share, now_s)
            if kind in PER_MINUTE and left is not None:
                self._alone.set_level(tenant, kind, share.limit, left, now_s)
        self._shares.clear()
        self._active.clear()


def rates_of(limits: RateLimits) -> dict[RateLimit, float]:
    """The limits per minute that there are."""
    found = {RateLimit.REQUESTS: limits.requests_per_minute, RateLimit.TOKENS: limits.tokens_per_minute}
    return {kind: limit for kind, limit in found.items() if limit > 0}


def _needed(kind: RateLimit, limit: float) -> float:
    """What there has to be for one more request. Where requests have a size, any room will do."""
    return min(1.0, limit) if kind in (RateLimit.REQUESTS, RateLimit.CONCURRENCY) else math.ulp(0.0)


def _each(kind: RateLimit, limit: float) -> float:
    """What one request is taken to want before its size is known."""
    return limit * _MONEY_WANTED if kind is RateLimit.MONEY else 1.0


def _spend(share: Share, amount: float) -> None:
    share.used += amount
    share.slice -= amount


def _is_given_back(use: ShareUse) -> bool:
    return not (use.slice or use.wanted or (use.used and use.kind not in PER_MINUTE))
