"""Copies keys, limits, usage and this month's spending from one place of accounts into another.

The audit log stays where it is: its lines are a chain, and the target has its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mooncache.accounts.core.copying import (
    AccountCopies,
    KeyCopies,
    LimitCopies,
    UsageCopies,
    keys_to_copy,
    limits_to_copy,
    spending_to_copy,
)
from mooncache.accounts.core.spending import SpendingPart
from mooncache.accounts.core.usage import HOUR_S, UsageCounts, UsageField, UsageHour, UsageKey
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.key_store import ENDED_KEPT_S, KeyStore, has_keys
from mooncache.accounts.limit_store import LimitStore, has_limits
from mooncache.accounts.months import month_of
from mooncache.accounts.spending_store import SpendingStore, has_spending
from mooncache.accounts.usage_store import KEPT_S, UsageStore, has_usage
from mooncache.errors import ConfigInvalid, InvalidArgument, NotFound

LATE_S: Final = 60
"""An hour is over for a copy so long after its end: gateways write what they counted every five seconds."""
_WRITER_BYTES: Final = 16


def copy_accounts(
    source: AccountsPlace, target: AccountsPlace, now_s: int, *, dry_run: bool = False
) -> AccountCopies:
    """Copy, or only say what a copy would do. One that failed in the middle may be repeated.

    Raises InvalidArgument, NotFound, LimitExceeded, ConfigInvalid, AccountsUnavailable.
    """
    if _is_same(source, target):
        raise InvalidArgument(f"Accounts are copied from another place, and both are {target}.")
    if not any(has(source) for has in (has_keys, has_limits, has_usage, has_spending)):
        raise NotFound(f"There are no accounts in {source}.")
    done = AccountCopies()
    if has_keys(source):
        done.keys = _copy_keys(source, target, now_s, dry_run=dry_run)
    if has_limits(source):
        done.limits = _copy_limits(source, target, dry_run=dry_run)
    if has_spending(source):
        done.budgets = _copy_spending(source, target, now_s, dry_run=dry_run)
    if has_usage(source):
        done.usage = _copy_usage(source, target, now_s, dry_run=dry_run)
    return done


def _is_same(source: AccountsPlace, target: AccountsPlace) -> bool:
    if isinstance(source, Path) and isinstance(target, Path):
        return source.resolve() == target.resolve()
    return str(source) == str(target)


def _copy_keys(source: AccountsPlace, target: AccountsPlace, now_s: int, *, dry_run: bool) -> KeyCopies:
    with KeyStore(source) as store:
        keys = store.all()
    if dry_run and not has_keys(target):
        return keys_to_copy(keys, {}, now_s - ENDED_KEPT_S)
    with KeyStore(target, create=not dry_run) as store:
        if dry_run:
            return keys_to_copy(keys, store.all(), now_s - ENDED_KEPT_S)
        return store.take_over(keys, now_s)


def _copy_limits(source: AccountsPlace, target: AccountsPlace, *, dry_run: bool) -> LimitCopies:
    with LimitStore(source) as store:
        limits = store.all()
    if dry_run and not has_limits(target):
        return limits_to_copy(limits, {})
    with LimitStore(target, create=not dry_run) as store:
        return limits_to_copy(limits, store.all()) if dry_run else store.take_over(limits)


def _copy_spending(source: AccountsPlace, target: AccountsPlace, now_s: int, *, dry_run: bool) -> int:
    """How many tenants and keys had spent something that the target did not know."""
    month = month_of(now_s)
    with SpendingStore(source) as store:
        spent = store.of_month(month)
    if dry_run and not has_spending(target):
        return len(spending_to_copy(spent, {}))
    with SpendingStore(target, create=not dry_run) as store:
        rows = spending_to_copy(spent, store.of_month(month))
        if rows and not dry_run:
            store.add(secrets.token_hex(_WRITER_BYTES), SpendingPart(1, month, rows), now_s)
    return len(rows)


def _copy_usage(source: AccountsPlace, target: AccountsPlace, now_s: int, *, dry_run: bool) -> UsageCopies:
    done = UsageCopies()
    ledger = _ledger_of(source, create=not dry_run)
    with UsageStore(source) as store:
        hours = {
            msgspec.convert(each.values[0], int): each.counts.requests
            for each in store.sums((UsageField.HOUR,), since_s=now_s - KEPT_S)
        }
        known = _copied(target, ledger)
        for hour_s, requests in hours.items():
            if hour_s in known:
                done.known_hours += 1
                done.late_requests += max(0, requests - known[hour_s])
            elif hour_s + HOUR_S + LATE_S > now_s:
                done.open_hours += 1
            else:
                done.hours += 1
                done.requests += requests
                if not dry_run:
                    _copy_hour(store, target, ledger, hour_s, now_s)
    return done


def _copy_hour(source: UsageStore, target: AccountsPlace, ledger: str, hour_s: int, now_s: int) -> None:
    sums = source.sums(tuple(UsageField), since_s=hour_s, until_s=hour_s + 1)
    try:
        rows: Mapping[UsageKey, UsageCounts] = {
            msgspec.convert(each.values, UsageKey): each.counts for each in sums
        }
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"{source.name} has a row that is no usage: {error}.") from None
    hour = UsageHour(ledger, hour_s, sum(each.requests for each in rows.values()))
    with UsageStore(target, create=True) as store:
        store.add_copied(hour, rows, now_s)


def _ledger_of(source: AccountsPlace, *, create: bool) -> str:
    """What names the source apart from all other places; "" before it has a name."""
    if not create and not has_spending(source):
        return ""
    with SpendingStore(source, create=create) as store:
        return store.ledger() if create else store.drawn_ledger()


def _copied(target: AccountsPlace, ledger: str) -> dict[int, int]:
    if not ledger or not has_usage(target):
        return {}
    with UsageStore(target) as store:
        return store.copied(ledger)
