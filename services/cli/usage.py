"""`mooncache usage`: what tenants used, as gateways metered it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.accounts.core.usage import COUNTS, HOUR_S, UsageField
from mooncache.cli.accounts import HERE, Accounts, moment_s
from mooncache.cli.common import HOW, AsJson
from mooncache.errors import InvalidArgument, NotFound
from mooncache.reporting.output import EXIT_OK, console, print_csv, print_json, print_table

if TYPE_CHECKING:
    from mooncache.accounts.database import AccountsPlace
    from mooncache.accounts.usage_store import UsageStore
    from mooncache.prices.core.price_book import PriceBook
    from mooncache.prices.core.usage_bill import BilledSum

_TENANT: Final = (UsageField.TENANT,)
_HEADS: Final = {
    UsageField.HOUR: "hour",
    UsageField.TENANT: "tenant",
    UsageField.KEY: "key",
    UsageField.MODEL: "model",
    UsageField.CLASS: "class",
}
MONEY: Final = ("input", "cached", "output", "saved", "total", "unpriced_tokens")
_UNPRICED: Final = (
    "{:,} of {:,} tokens have no price in cost.tokens of the price book, and are in no sum of money"
)
_ESTIMATED: Final = (
    "{:,} of {:,} tokens are estimates: no engine said how many there were, since the answer was cut off"
)


def usage(
    *,
    since: Annotated[str, Parameter(help='From then on: "7d" ago, or "2027-01-01" (UTC).')] = "30d",
    until: Annotated[str, Parameter(help="Before then; default now.")] = "",
    by: Annotated[
        tuple[UsageField, ...], Parameter(negative=(), help="A line for each; may be given several times.")
    ] = _TENANT,
    tenant: Annotated[str, Parameter(help="Only of this tenant.")] = "",
    csv: Annotated[bool, Parameter(negative=(), group=HOW, help="Print comma-separated values.")] = False,
    prices: Annotated[
        Path | None,
        Parameter(help="Price book, TOML, for columns of money: its rules cost.tokens. Default: no money."),
    ] = None,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """Show what tenants used: requests, tokens by kind, what failed or was cancelled, and what it costs them.

    Gateways of this host, or those that share a database, meter each request when it ends, with the tokens that the
    engine counted, and write it down every five seconds. Hours count as a whole: those that begin within the time asked
    for. Offline is the class of requests of batches.

    For example:

        mooncache usage --since 2027-01-01 --until 2027-02-01 --csv > january.csv

        mooncache usage --tenant team-a --by hour --by model --since 24h

        mooncache usage --prices prices.toml
    """
    if csv and json:
        raise InvalidArgument("--csv and --json exclude each other.")
    from mooncache.prices.core.price_book import PriceBook
    from mooncache.prices.core.usage_bill import billed
    from mooncache.prices.loading import read_prices

    fields = tuple(dict.fromkeys(by))
    since_s, until_s = _span(since, until, int(time.time()))
    book = read_prices(prices) if prices is not None else PriceBook()
    with accounts.opened() as place, _store(place) as store:
        each_price = (*fields, UsageField.MODEL, UsageField.CLASS)
        sums = store.sums(each_price, since_s=since_s, until_s=until_s, tenant=tenant or None)
    rows = billed(sums, book)
    if json:
        document: dict[str, Any] = {"since_unix_s": since_s, "until_unix_s": until_s}
        if prices is not None:
            document["currency"] = book.cost.currency
        usage_rows = [_described(fields, row, priced=prices is not None) for row in rows]
        print_json({**document, "usage": usage_rows})
    elif csv:
        money = MONEY if prices is not None else ()
        print_csv(
            [*(_HEADS[each] for each in fields), *COUNTS, *money],
            [
                [*_values(fields, row), *_counts(row), *(_exact(getattr(row.money, each)) for each in money)]
                for row in rows
            ],
        )
    else:
        _show(fields, rows, book if prices is not None else None)
    return EXIT_OK


def _span(since: str, until: str, now_s: int) -> tuple[int, int]:
    """The hours that are asked for. Raises InvalidArgument."""
    since_s = moment_s(since, now_s, "--since", past=True)
    until_s = moment_s(until, now_s, "--until", past=True) if until else now_s + HOUR_S
    if since_s >= until_s:
        raise InvalidArgument("--since has to be before --until.")
    return since_s // HOUR_S * HOUR_S, until_s


def _store(place: AccountsPlace) -> UsageStore:
    from mooncache.accounts.usage_store import UsageStore, has_usage

    if not has_usage(place):
        raise NotFound(
            f"There is no usage in {place}: no gateway of this host has metered a request "
            "(gateway.usage_enabled), or it keeps accounts elsewhere (--accounts-dir)."
        )
    return UsageStore(place)


def _values(fields: tuple[UsageField, ...], row: BilledSum) -> list[str]:
    """What a line is about, as text."""
    return [
        _hour(int(value)) if field is UsageField.HOUR else str(value)
        for field, value in zip(fields, row.values, strict=True)
    ]


def _counts(row: BilledSum) -> list[int]:
    return [getattr(row.counts, each) for each in COUNTS]


def _described(fields: tuple[UsageField, ...], row: BilledSum, *, priced: bool) -> dict[str, Any]:
    named: dict[str, Any] = {str(field): value for field, value in zip(fields, row.values, strict=True)}
    named |= dict(zip(COUNTS, _counts(row), strict=True))
    return named | ({each: getattr(row.money, each) for each in MONEY} if priced else {})


def _exact(value: float) -> str:
    """Money as spreadsheets take it, without an exponent."""
    return str(value) if isinstance(value, int) else f"{value:.9f}"


def _hour(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _show(fields: tuple[UsageField, ...], rows: list[BilledSum], book: PriceBook | None) -> None:
    from mooncache.cli.core.cost_text import money

    heads = [_HEADS[each] for each in fields]
    columns = ("requests*", "failed*", "cancelled*", "input*", "cached*", "output*")
    costs = (f"{book.cost.currency}*", "saved*") if book is not None else ()
    table = [
        [
            *_values(fields, row),
            *(f"{count:,}" for count in _counts(row)[: len(columns)]),
            *(money(value) for value in (row.money.total, row.money.saved)[: len(costs)]),
        ]
        for row in rows
    ]
    print_table("usage", [*heads, *columns, *costs], table)
    tokens = sum(row.counts.input_tokens + row.counts.output_tokens for row in rows)
    estimated = sum(row.counts.estimated_tokens for row in rows)
    unpriced = sum(row.money.unpriced_tokens for row in rows)
    if estimated:
        _say(_ESTIMATED.format(estimated, tokens))
    if book is not None and unpriced:
        _say(_UNPRICED.format(unpriced, tokens))


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
