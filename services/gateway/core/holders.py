"""Whose limits are counted: a tenant's, or those of one of its keys. A holder is the name of either."""

from __future__ import annotations

from typing import Final

_KEY_MARK: Final = "/"  # no tenant's name has it


def holder_of(tenant: str, key_id: str) -> str:
    """The holder of the limits that a key has for itself."""
    return f"{tenant}{_KEY_MARK}{key_id}"


def split_holder(holder: str) -> tuple[str, str]:
    """Tenant and key; the key is "" for a tenant's own limits."""
    tenant, _, key_id = holder.partition(_KEY_MARK)
    return tenant, key_id


def of_key(holder: str) -> str:
    """What messages add where a limit is one of a key."""
    return " with this API key" if _KEY_MARK in holder else ""
