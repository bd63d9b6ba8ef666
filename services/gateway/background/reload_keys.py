"""Reads API keys again when they have changed, and ends what runs with a key that was revoked or has expired.

A key can be made and taken away without a restart; both are in force within two looks.
"""

from __future__ import annotations

from mooncache.gateway.shell.key_changes import look_for_keys
from mooncache.gateway.state import GatewayState


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid for a file that is wrong; the keys of before stay in force."""
    await look_for_keys(state)
