"""`mooncache accounts copy`: what is kept of tenants goes from one place into another."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.accounts import HERE, Accounts
from mooncache.cli.acts import note
from mooncache.cli.common import AsJson
from mooncache.reporting.output import EXIT_OK, console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.accounts.core.copying import AccountCopies

_NAMES_MAX = 10


def copy(
    source: Annotated[
        str, Parameter(help="Where they are: a folder of accounts, or postgresql://USER@HOST/NAME.")
    ],
    /,
    *,
    dry_run: Annotated[bool, Parameter(negative=(), help="Count, and copy nothing.")] = False,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """Copy keys, limits, usage and this month's spending into the accounts of this cluster.

    The target is --accounts-dir or the setting cluster.accounts_dir. What it has stays; a key that was revoked at
    either place is revoked there. The source is not changed. Run it as often as you like: nothing is added twice, and
    usage of hours that are not over yet is copied later. The audit log stays where it is.

    For example:

        mooncache accounts copy ~/.mooncache/accounts --dry-run

        mooncache accounts copy /srv/old/accounts --accounts-dir postgresql://mooncache@db.example/mooncache
    """
    from mooncache.accounts.copying import copy_accounts

    with Accounts(source).opened() as old, accounts.opened() as new:
        names = {"from": str(old), "to": str(new)}
        done = copy_accounts(old, new, int(time.time()), dry_run=dry_run)
    note(keys=str(len(done.keys.new)), limits=str(len(done.limits.new)), usage_hours=str(done.usage.hours))
    if json:
        print_json({**names, "dry_run": dry_run, **_described(done)})
    else:
        _show(done, names, dry_run=dry_run)
    return EXIT_OK


def _described(done: AccountCopies) -> dict[str, Any]:
    keys, limits, usage = done.keys, done.limits, done.usage
    return {
        "keys": {
            "copied": len(keys.new),
            "revoked": [each.key_id for each in keys.revoked],
            "known": keys.known,
            "differing": list(keys.differing),
        },
        "limits": {
            "copied": len(limits.new),
            "known": limits.known,
            "differing": [list(holder) for holder in limits.differing],
        },
        "usage": {
            "copied_hours": usage.hours,
            "copied_requests": usage.requests,
            "known_hours": usage.known_hours,
            "open_hours": usage.open_hours,
            "late_requests": usage.late_requests,
        },
        "spending": {"copied": done.budgets},
    }


def _show(done: AccountCopies, names: dict[str, str], *, dry_run: bool) -> None:
    keys, limits, usage = done.keys, done.limits, done.usage
    title = f"{'Would be copied' if dry_run else 'Copied'} from {names['from']} to {names['to']}"
    rows = [
        ["keys", f"{len(keys.new):,}", f"{keys.known:,}"],
        ["keys that are revoked now", f"{len(keys.revoked):,}", ""],
        ["limits of tenants and keys", f"{len(limits.new):,}", f"{limits.known:,}"],
        ["hours of usage", f"{usage.hours:,}", f"{usage.known_hours:,}"],
        ["requests in these hours", f"{usage.requests:,}", ""],
        ["spending of this month, tenants and keys", f"{done.budgets:,}", ""],
    ]
    print_table(title, ["what", "copied", "there already"], rows)
    for line in _remarks(done):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _remarks(done: AccountCopies) -> list[str]:
    """What is not copied, and why."""
    found = []
    if done.keys.differing:
        found.append(f"{_few(done.keys.differing)}: the target has another key of that id, which stays.")
    if done.limits.differing:
        names = _few(tuple(" ".join(filter(None, holder)) for holder in done.limits.differing))
        found.append(f"{names}: the target has other limits, which stay.")
    if done.usage.open_hours:
        now = datetime.now(UTC)
        found.append(
            f"Usage of the hour that is not over is left out: run this again after {(now.hour + 1) % 24:02}:01 UTC."
        )
    if done.usage.late_requests:
        found.append(
            f"{done.usage.late_requests:,} requests came into hours that had been copied before; "
            "they are at the source alone."
        )
    return found


def _few(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(sorted(names)[:_NAMES_MAX]) + (f" and {more:,} more" if more > 0 else "")
