"""Takes changes of API keys and limits over, and ends what runs with a key that was revoked or has expired.

While a database of several hosts is away, the keys that are known stay in force. That is logged once, and the metric of
the time since the last look that succeeded grows.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from mooncache.errors import AccountsUnavailable, MooncacheError
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import uninterrupted

if TYPE_CHECKING:
    from mooncache.gateway.state import GatewayState

log = get_logger(__name__)


async def look_for_keys(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid for a file that is wrong; the keys of before stay in force."""
    try:
        # Its thread goes on when who asked leaves, so the lock has to be held as long.
        if await uninterrupted(asyncio.create_task(_look_alone(state))):
            log.info(Event.KEYS_RELOADED)
    finally:  # keys expire, whether or not their file can be read
        for key_id, count in state.keyed.end(state.keyring.end_of).items():
            log.info(Event.KEY_ENDED, key_id=key_id, count=count)


async def _look_alone(state: GatewayState) -> bool:
    """Whether something had changed. Raises ConfigInvalid."""
    async with state.key_look:  # an older look that ends later would bring older keys back
        return await asyncio.to_thread(_look, state)


async def take_keys_over(state: GatewayState) -> None:
    """Look at once, after a change that was made here. What is wrong with another file is the duty's to say."""
    with contextlib.suppress(MooncacheError):
        await look_for_keys(state)


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
