"""Reads API keys again when they have changed, and ends what runs with a key that was revoked or has expired.

A key can be made and taken away without a restart; both are in force within two looks. While a database of several
hosts is away, the keys that are known stay in force. That is logged once, and the metric of the time since the last
look that succeeded grows.
"""

from __future__ import annotations

import asyncio

from mooncache.errors import AccountsUnavailable
from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid for a file that is wrong; the keys of before stay in force."""
    try:
        if await asyncio.to_thread(_look, state):
            log.info(Event.KEYS_RELOADED)
    finally:  # keys expire, whether or not their file can be read
        for key_id, count in state.keyed.end(state.keyring.end_of).items():
            log.info(Event.KEY_ENDED, key_id=key_id, count=count)


def _look(state: GatewayState) -> bool:
    """Whether something had changed. A database that is away is looked for again as often as ever."""
    lost_s = state.keyring.unconfirmed_s
    try:
        changed = state.keyring.refresh()
    except AccountsUnavailable as error:
        if not state.accounts_lost:
            state.accounts_lost = True
            log.warning(Event.ACCOUNTS_LOST, reason=error.message)
        return False
    if state.accounts_lost:
        state.accounts_lost = False
        log.info(Event.ACCOUNTS_FOUND, seconds=round(lost_s, 1))
    return changed
