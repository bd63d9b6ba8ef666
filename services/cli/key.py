"""`mooncache key create | ls | limit | revoke`: API keys of tenants, with what they are for and when they end."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mooncache.accounts.core.api_key import KeyScope
from mooncache.cli.accounts import HERE, Accounts, moment_s, operator
from mooncache.cli.acts import note
from mooncache.cli.common import AsJson
from mooncache.cli.request_limits import (
    REQUEST_OPTIONS,
    UNCHANGED,
    RequestLimitOptions,
    limits_text,
)
from mooncache.errors import InvalidArgument, NotFound
from mooncache.reporting.output import EXIT_OK, console, error_console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.accounts.core.api_key import ApiKeyRecord

_INFERENCE = (KeyScope.INFERENCE,)


def create(
    *,
    tenant: Annotated[str, Parameter(help="Whose key it is.")],
    scope: Annotated[
        tuple[KeyScope, ...], Parameter(negative=(), help="What it is for; may be given several times.")
    ] = _INFERENCE,
    expires: Annotated[
        str, Parameter(help='When it ends: after a time such as "90d", or at one, "2027-01-31" (UTC).')
    ] = "",
    name: Annotated[str, Parameter(help="A name for people, as in lists.")] = "",
    requests_per_minute: Annotated[
        float, Parameter(help="The tenant's limit instead of gateway.requests_per_minute; 0: as that says.")
    ] = 0,
    tokens_per_minute: Annotated[
        float, Parameter(help="The tenant's limit instead of gateway.tokens_per_minute; 0: as that says.")
    ] = 0,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """Make an API key of a tenant and print it. It is not kept and never shown again; gateways here know its hash.

    Gateways on this host take it within two seconds. Scopes are inference, batches, usage (what the tenant has used)
    and metrics (the gateway's /metrics).

    For example:

        mooncache key create --tenant team-a --expires 90d --name ci

        mooncache key create --tenant team-a --scope inference --scope batches > team-a.key && chmod 600 team-a.key
    """
    from mooncache.accounts.key_store import create_key

    now_s = int(time.time())
    expires_s = _end_s(expires, now_s)
    with accounts.opened() as place:
        text, record = create_key(
            place,
            tenant,
            scope,
            created_s=now_s,
            created_by=operator(),
            expires_s=expires_s,
            name=name,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
    note(key_id=record.key_id, tenant=tenant)
    if json:
        print_json({"key": text, **record.described(now_s)})
        return EXIT_OK
    console.print(text, markup=False, soft_wrap=True)
    until = f"until {_moment(record.expires_s)}" if record.expires_s else "without an end"
    error_console.print(
        f"key {record.key_id} of {tenant}, for {', '.join(sorted(record.scopes))}, {until}; it is not shown again",
        markup=False,
        style="dim",
        soft_wrap=True,
    )
    return EXIT_OK


def ls(
    *,
    tenant: Annotated[str, Parameter(help="Only keys of this tenant.")] = "",
    all_keys: Annotated[
        bool, Parameter(name="--all", negative=(), help="Also keys that were revoked or have expired.")
    ] = False,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """List API keys: whose, what for, until when, and their limits. The keys themselves are not kept.

    Limits are those of the key; those of its tenant hold as well (`mooncache tenant set`).

    For example:

        mooncache key ls --tenant team-a --all
    """
    from mooncache.accounts.core.request_limits import HolderLimits
    from mooncache.accounts.key_store import every_key
    from mooncache.accounts.limit_store import all_limits

    now_s = int(time.time())
    with accounts.opened() as place:
        records, limits = every_key(place), all_limits(place)
    found = [
        record.described(now_s)
        | {"requests": asdict(limits.get((record.tenant, record.key_id), HolderLimits()))}
        for record in records.values()
        if (not tenant or record.tenant == tenant) and (all_keys or not _has_ended(record, now_s))
    ]
    if json:
        print_json({"keys": found})
        return EXIT_OK
    rows = [
        [
            each["id"],
            each["tenant"],
            each["name"],
            " ".join(each["scopes"]),
            each["state"],
            _moment(each["created_unix_s"]),
            _moment(each["revoked_unix_s"] or each["expires_unix_s"]),
            limits_text(each["requests"]),
        ]
        for each in found
    ]
    columns = ["id", "tenant", "name", "scopes", "state", "made (UTC)", "ended, or will (UTC)", "limits"]
    print_table("API keys", columns, rows)
    return EXIT_OK


def limit(
    key_id: Annotated[str, Parameter(help="Id of the key, as `mooncache key ls` prints it.")],
    /,
    *,
    limits: RequestLimitOptions = UNCHANGED,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """Set limits on requests with one key, beside those of its tenant; what is not named stays as it is.

    They hold over all gateways, and are in force at those of this host within two seconds.

    For example:

        mooncache key limit 3f0c9a5be21d7748 --requests-per-minute 60 --tokens-under-way 20000
    """
    from mooncache.accounts.key_store import every_key
    from mooncache.accounts.limit_store import change_limits

    given = limits.given()
    if not given:
        raise InvalidArgument(f"Name at least one of {', '.join(REQUEST_OPTIONS)}.")
    with accounts.opened() as place:
        found = every_key(place).get(key_id)
        if found is None:
            raise NotFound(f"There is no key {key_id[:80]} in {place}; `mooncache key ls` lists them.")
        note(tenant=found.tenant)
        document = asdict(change_limits(place, found.tenant, key_id, given))
    if json:
        print_json({"id": key_id, "tenant": found.tenant, "requests": document})
    else:
        text = f"{key_id} of {found.tenant}: {limits_text(document)}; in force here within two seconds"
        console.print(text, markup=False, highlight=False)
    return EXIT_OK


def revoke(
    key_id: Annotated[str, Parameter(help="Id of the key, as `mooncache key ls` prints it.")],
    /,
    *,
    accounts: Accounts = HERE,
    json: AsJson = False,
) -> int:
    """End an API key. Gateways here refuse it within two seconds, and end the answers that are under way.

    For example:

        mooncache key revoke 3f0c9a5be21d7748
    """
    from mooncache.accounts.key_store import revoke_key

    now_s = int(time.time())
    with accounts.opened() as place:
        record = revoke_key(place, key_id, now_s)
    note(tenant=record.tenant)
    if json:
        print_json(record.described(now_s))
    else:
        text = f"{record.key_id} of {record.tenant} was revoked at {_moment(record.revoked_s)} UTC"
        console.print(text, markup=False, highlight=False)
    return EXIT_OK


def _has_ended(record: ApiKeyRecord, now_s: int) -> bool:
    return bool(record.end_s) and record.end_s <= now_s


def _end_s(text: str, now_s: int) -> int:
    """When a key ends, Unix seconds; 0 for "". Raises InvalidArgument."""
    if not text:
        return 0
    end_s = moment_s(text, now_s, "--expires")
    if end_s <= now_s:
        raise InvalidArgument(f"--expires: {text} is not in the future.")
    return end_s


def _moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M") if unix_s else "-"
