"""Duty: connect to the pool, and keep trying while there is none. Requests are served without it
meanwhile."""

from __future__ import annotations

from mooncache.conductor.state import ConductorState
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


async def run_once(state: ConductorState) -> None:
    """Try once. Raises ConfigInvalid: a wrong setting does not heal by itself and has to be seen."""
    try:
        if await state.pool.connect():
            log.info(Event.POOL_CONNECTED, masters=",".join(state.config.cluster.master_targets))
    except ConfigInvalid:
        raise
    except MooncacheError as error:
        log.debug(Event.POOL_ABSENT, code=error.name, reason=error.message)
