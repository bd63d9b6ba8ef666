"""API keys of an operator's own: a TOML file of hashes, so that the file itself opens nothing.

[[key]]
sha256 = "<64 hex digits: SHA-256 of the key's text>"
tenant = "alice"
requests_per_minute = 60   # optional; 0 or missing takes the gateway's setting
tokens_per_minute = 100000 # optional
console = true             # optional; the key also opens the console, which shows all tenants' requests
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from mooncache.auth import check_tenant_name
from mooncache.config.small_files import parse_toml
from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.gateway.core.rate_limit import RateLimits

FILE_BYTES_MAX: Final = 16 << 20
KEY_COUNT_MAX: Final = 100_000
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = {"sha256", "tenant", "requests_per_minute", "tokens_per_minute", "console"}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Whose key it is and what it may use."""

    tenant: str
    limits: RateLimits
    console: bool = False


def parse(text: str, defaults: RateLimits) -> dict[str, ApiKey]:
    """Keys by the hash of their text. Raises ConfigInvalid that names the entry, never a key."""
    tables = parse_toml(text, "gateway.keys_file", ConfigInvalid)
    entries = tables.pop("key", [])
    if tables or not isinstance(entries, list):
        raise ConfigInvalid("gateway.keys_file may hold [[key]] tables and nothing else.")
    if len(entries) > KEY_COUNT_MAX:
        raise ConfigInvalid(f"gateway.keys_file has more than {KEY_COUNT_MAX} keys.")
    found: dict[str, ApiKey] = {}
    for number, entry in enumerate(entries, start=1):
        digest, key = _entry(number, entry, defaults)
        if digest in found:
            raise ConfigInvalid(f"gateway.keys_file: key {number} appears twice.")
        found[digest] = key
    return found


def _entry(number: int, entry: object, defaults: RateLimits) -> tuple[str, ApiKey]:
    where = f"gateway.keys_file: key {number}"
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise ConfigInvalid(f"{where} may have {', '.join(sorted(_FIELDS))} only.")
    digest, tenant = entry.get("sha256"), entry.get("tenant")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest.lower()):
        raise ConfigInvalid(f"{where}: sha256 has to be 64 hex digits, the SHA-256 of the key's text.")
    try:
        check_tenant_name(tenant if isinstance(tenant, str) else "")
    except InvalidArgument as error:
        raise ConfigInvalid(f"{where}: {error.message}") from None
    limits = RateLimits(
        _rate(where, entry, "requests_per_minute") or defaults.requests_per_minute,
        _rate(where, entry, "tokens_per_minute") or defaults.tokens_per_minute,
    )
    console = entry.get("console", False)
    if not isinstance(console, bool):
        raise ConfigInvalid(f"{where}: console has to be true or false.")
    return digest.lower(), ApiKey(str(tenant), limits, console)


def _rate(where: str, entry: dict[str, object], name: str) -> float:
    value = entry.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ConfigInvalid(f"{where}: {name} has to be a number, 0 or more.")
    return float(value)
