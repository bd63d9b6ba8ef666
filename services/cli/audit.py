"""`mooncache audit`: what operators did."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from cyclopts import Parameter

from mooncache.cli.accounts import HERE, Accounts, moment_s
from mooncache.cli.common import AsJson
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.accounts.core.audit import AuditEntry
    from mooncache.accounts.database import AccountsPlace

LIMIT_MAX = 100_000


def audit(
    *,
    since: Annotated[str, Parameter(help='Only acts from then on: "7d" ago, or "2027-01-31" (UTC).')] = "",
    until: Annotated[str, Parameter(help="Only acts before then.")] = "",
    who: Annotated[str, Parameter(help="Only acts of this user, as user or user@host.")] = "",
    what: Annotated[str, Parameter(help='Only these acts, by the first words: "key", "tenant purge".')] = "",
    failed: Annotated[bool, Parameter(negative=(), help="Only acts that did not succeed.")] = False,
    limit: Annotated[int, Parameter(help="The latest so many.")] = 1000,
    verify: Annotated[
        bool, Parameter(negative=(), help="Check instead that no line was changed or taken out.")
    ] = False,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """Show what operators did with the commands of this host, or of all that share a database, the oldest first.

    Keys that were made and revoked, limits and purges of tenants, roles, drains, restarts, upgrades, invitations. Each
    line names the hash of the one before it; --verify exits with 1 where that does not fit.

    For example:

        mooncache audit --since 7d --what key

        mooncache audit --verify
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"--limit must be from 1 to {LIMIT_MAX}.")
    if verify:
        with accounts.opened() as place:
            return _verify(place, json=json)
    now_s = int(time.time())
    wanted = _ActFilter(
        moment_s(since, now_s, "--since", past=True) * 1000 if since else 0,
        moment_s(until, now_s, "--until", past=True) * 1000 if until else 1 << 63,
        who,
        what.split(),
        failed,
    )
    with accounts.opened() as place:
        _show(place, wanted, limit, json=json)
    return EXIT_OK


class _ActFilter(NamedTuple):
    """Which entries are shown."""

    from_ms: int
    to_ms: int
    who: str
    words: list[str]
    failed: bool

    def has(self, entry: AuditEntry) -> bool:
        return (
            self.from_ms <= entry.unix_ms < self.to_ms
            and (not self.who or self.who in (entry.who, entry.who.partition("@")[0]))
            and entry.what.split()[: len(self.words)] == self.words
            and not (self.failed and entry.result == "OK")
        )


def _verify(place: AccountsPlace, *, json: bool) -> int:
    from mooncache.accounts.audit_log import first_break_of

    broken = first_break_of(place)
    if json:
        print_json({"sound": broken is None, "first_break": broken})
    else:
        console.print(
            "each line follows from the one before it" if broken is None else f"line {broken} does not follow"
        )
    return EXIT_OK if broken is None else EXIT_MISS


def _show(place: AccountsPlace, wanted: _ActFilter, limit: int, *, json: bool) -> None:
    from mooncache.accounts.audit_log import lines
    from mooncache.accounts.core.audit import read_entry

    damaged = 0
    found: deque[AuditEntry] = deque(maxlen=limit)
    for line in lines(place):
        entry = read_entry(line)
        damaged += entry is None
        if entry is not None and wanted.has(entry):
            found.append(entry)
    if json:
        print_json({"entries": [msgspec.to_builtins(each) for each in found], "damaged_lines": damaged})
        return
    rows = [
        [
            datetime.fromtimestamp(each.unix_ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            each.who,
            each.what,
            " ".join((*each.arguments, *(f"({name} {value})" for name, value in each.details.items()))),
            each.result,
        ]
        for each in found
    ]
    print_table("acts", ["when (UTC)", "who", "what", "with", "result"], rows)
    if damaged:
        console.print(f"{damaged} lines cannot be read")
