"""Keys and limits of tenants on the console: the same stores and functions as `mooncache key` and `tenant set`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from mooncache.accounts.core.api_key import ApiKeyRecord, is_key_id
from mooncache.accounts.core.request_limits import HolderLimits, LimitHolder
from mooncache.accounts.database import AccountsPlace
from mooncache.accounts.key_store import create_key, keys_of_tenant, revoke_key, valid_key_counts
from mooncache.accounts.limit_store import all_limits, change_limits
from mooncache.auth import check_tenant_name
from mooncache.errors import LimitExceeded, NotFound
from mooncache.gateway.console.acts import AuditedActs
from mooncache.gateway.core.console_keys import AskedKey, AskedLimits
from mooncache.runtime.clock import Clock

QUESTIONS_MAX: Final = 4
"""Lists that are read at the same time."""
_BY_CHARS_MAX: Final = 128


class ConsoleKeys:
    """Reads and changes the accounts of this gateway. Each call runs in a thread: databases block for a moment."""

    def __init__(self, acts: AuditedActs, clock: Clock, accounts: AccountsPlace) -> None:
        self._acts, self._clock, self._accounts = acts, clock, accounts
        self._questions = 0

    async def tenants(self) -> dict[str, int]:
        """How many valid keys each tenant has. Raises LimitExceeded, ConfigInvalid, AccountsUnavailable."""
        return dict(await self._read(valid_key_counts, self._accounts, round(self._clock.wall_s())))

    async def of_tenant(self, tenant: str) -> dict[str, Any]:
        """A tenant's keys, the newest first, with the limits of each, and the limits that were set for the tenant.

        Raises InvalidArgument, LimitExceeded, ConfigInvalid, AccountsUnavailable.
        """
        found, limits = await self._read(self._keys_and_limits, check_tenant_name(tenant))
        now_s = self._clock.wall_s()
        return {
            "tenant": tenant,
            "at_s": now_s,
            "limits": asdict(limits.get((tenant, ""), HolderLimits())),
            "keys": [
                each.described(now_s) | {"limits": asdict(limits.get((tenant, each.key_id), HolderLimits()))}
                for each in found
            ],
        }

    async def create(self, asked: AskedKey, who: str) -> dict[str, Any]:
        """A new key with its text, which is not kept.

        Raises InvalidArgument, LimitExceeded, ConfigInvalid, AccountsUnavailable.
        """
        details: dict[str, str] = {}

        async def work() -> dict[str, Any]:
            now_s = int(self._clock.wall_s())
            made = await asyncio.to_thread(
                create_key,
                self._accounts,
                asked.tenant,
                asked.scopes,
                created_s=now_s,
                created_by=f"{who}, console"[:_BY_CHARS_MAX],
                expires_s=asked.expires_unix_s,
                name=asked.name,
            )
            details["key_id"] = made.record.key_id
            return {"key": made.text, **made.record.described(now_s)}

        answer, audited = await self._acts.run(created_command(asked), who, details, work)
        return {**answer, "audited": audited}

    async def revoke(self, key_id: str, who: str) -> dict[str, Any]:
        """A key that has ended now. Raises NotFound, LimitExceeded, ConfigInvalid, AccountsUnavailable."""
        if not is_key_id(key_id):
            raise NotFound("An id of a key has 16 hexadecimal digits.")
        details: dict[str, str] = {}

        async def work() -> dict[str, Any]:
            now_s = int(self._clock.wall_s())
            record = await asyncio.to_thread(revoke_key, self._accounts, key_id, now_s)
            details["tenant"] = record.tenant
            return record.described(now_s)

        answer, audited = await self._acts.run(("key revoke", key_id), who, details, work)
        return {**answer, "audited": audited}

    async def limit(self, asked: AskedLimits, who: str) -> dict[str, Any]:
        """All limits that a tenant has then, or a key of it.

        Raises InvalidArgument, NotFound for a key that the tenant does not have, LimitExceeded, ConfigInvalid,
        AccountsUnavailable.
        """

        async def work() -> HolderLimits:
            return await asyncio.to_thread(self._limit, asked)

        details = {"tenant": asked.tenant} if asked.key_id else {}
        limits, audited = await self._acts.run(limits_command(asked), who, details, work)
        return {"tenant": asked.tenant, "key_id": asked.key_id, "limits": asdict(limits), "audited": audited}

    def _limit(self, asked: AskedLimits) -> HolderLimits:
        check_tenant_name(asked.tenant)
        if asked.key_id:
            known = keys_of_tenant(self._accounts, asked.tenant)
            if asked.key_id not in {each.key_id for each in known}:
                raise NotFound(f"Tenant {asked.tenant} has no key with this id.")
        return change_limits(self._accounts, asked.tenant, asked.key_id, asked.given())

    def _keys_and_limits(self, tenant: str) -> tuple[list[ApiKeyRecord], dict[LimitHolder, HolderLimits]]:
        return keys_of_tenant(self._accounts, tenant), all_limits(self._accounts)

    async def _read(self, read: Any, *arguments: Any) -> Any:
        if self._questions >= QUESTIONS_MAX:
            raise LimitExceeded("Too many lists of keys are asked for at this moment; try again.")
        self._questions += 1
        try:
            return await asyncio.to_thread(read, *arguments)
        finally:
            self._questions -= 1


def created_command(asked: AskedKey) -> list[str]:
    """The command that makes such a key, as the audit log has it; "--expires" in UTC."""
    words = ["key create", "--tenant", asked.tenant]
    for scope in sorted(set(asked.scopes)):
        words += ["--scope", scope]
    if asked.expires_unix_s:
        end = datetime.fromtimestamp(asked.expires_unix_s, UTC)
        words += ["--expires", end.strftime("%Y-%m-%dT%H:%M:%S")]
    return [*words, "--name", asked.name] if asked.name else words


def limits_command(asked: AskedLimits) -> list[str]:
    """The command that sets such limits, as the audit log has it."""
    words = ["key limit", asked.key_id] if asked.key_id else ["tenant set", asked.tenant]
    for name, value in asked.given().items():
        words += [f"--{name.replace('_', '-')}", f"{value:.15g}"]
    return words
