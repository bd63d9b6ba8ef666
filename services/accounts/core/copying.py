"""What is copied from one place of accounts into another: pure functions of what both have.

A copy may be repeated at any time and adds nothing twice. What the target has stays, with one exception: a key that was
revoked at either place is revoked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncache.accounts.core.api_key import ApiKeyRecord
from mooncache.accounts.core.request_limits import HolderLimits, LimitHolder
from mooncache.accounts.core.spending import LedgerRow


class KeyCopies(NamedTuple):
    """Keys that the target lacks, and those that end there. `differing`: the target has another key of that id."""

    new: tuple[ApiKeyRecord, ...] = ()
    revoked: tuple[ApiKeyRecord, ...] = ()
    known: int = 0
    differing: tuple[str, ...] = ()


class LimitCopies(NamedTuple):
    """Limits of those who have none at the target. `differing`: the target's stay."""

    new: Mapping[LimitHolder, HolderLimits]
    known: int
    differing: tuple[LimitHolder, ...]


@dataclass(slots=True)
class UsageCopies:
    """Hours of usage. `late_requests` came into an hour of the source after it had been copied, and are not copied."""

    hours: int = 0
    requests: int = 0
    known_hours: int = 0
    late_requests: int = 0
    open_hours: int = 0  # that are not over: they are copied by a later run


@dataclass(slots=True)
class AccountCopies:
    """What a copy did, or would do."""

    keys: KeyCopies = field(default_factory=KeyCopies)
    limits: LimitCopies = field(default_factory=lambda: LimitCopies({}, 0, ()))
    usage: UsageCopies = field(default_factory=UsageCopies)
    budgets: int = 0
    """Tenants and keys whose spending of this month the target did not know."""


def keys_to_copy(
    source: Mapping[str, ApiKeyRecord], target: Mapping[str, ApiKeyRecord], forgotten_s: int
) -> KeyCopies:
    """Keys by their id. Those that ended before `forgotten_s` (Unix time) are left behind."""
    new, revoked, differing, known = [], [], [], 0
    for key_id, record in source.items():
        there = target.get(key_id)
        if there is None:
            if not record.end_s or record.end_s >= forgotten_s:
                new.append(record)
        elif (there.digest, there.tenant) != (record.digest, record.tenant):
            differing.append(key_id)
        elif record.revoked_s and not there.revoked_s:
            revoked.append(record)
        else:
            known += 1
    return KeyCopies(tuple(new), tuple(revoked), known, tuple(differing))


def limits_to_copy(
    source: Mapping[LimitHolder, HolderLimits], target: Mapping[LimitHolder, HolderLimits]
) -> LimitCopies:
    """Limits by their holder."""
    new = {holder: limits for holder, limits in source.items() if holder not in target}
    differing = tuple(holder for holder in source.keys() - new.keys() if source[holder] != target[holder])
    return LimitCopies(new, len(source) - len(new) - len(differing), differing)


def spending_to_copy(
    source: Mapping[str, LedgerRow], target: Mapping[str, LedgerRow]
) -> dict[str, LedgerRow]:
    """What holders have spent by the source, as money of others to the target.

    Whom the target knows is left out: gateways there have heard of the source, and its money would count twice.
    """
    return {
        holder: LedgerRow(0.0, row.own + row.others) for holder, row in source.items() if holder not in target
    }
