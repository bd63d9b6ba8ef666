"""Reads the file of API keys again when it has changed: a key can be added or taken away without a restart."""

from __future__ import annotations

from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """One look. Raises ConfigInvalid for a file that is wrong; the keys of before stay in force."""
    if state.keyring.refresh():
        log.info(Event.KEYS_RELOADED)
