"""Reads API keys again when they have changed, and ends what runs with a key that was revoked or has expired.

A key can be made and taken away without a restart; both are in force within two looks.
"""

from __future__ import annotations

import asyncio

from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid for a file that is wrong; the keys of before stay in force."""
    try:
        if await asyncio.to_thread(state.keyring.refresh):
            log.info(Event.KEYS_RELOADED)
    finally:  # keys expire, whether or not their file can be read
        for key_id, count in state.keyed.end(state.keyring.end_of).items():
            log.info(Event.KEY_ENDED, key_id=key_id, count=count)
