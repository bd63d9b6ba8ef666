"""Keeps the list of instances fresh by long polling; without the conductor the last list stays in use."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.gateway.shell.instance_list import engine_instance_of
from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger

WAIT_S: Final = 10.0
_LOST_WAIT_S: Final = 0.5
_LOADING_MAX: Final = 64

log = get_logger(__name__)


async def run(state: GatewayState) -> None:
    """Poll until cancelled. Raises MooncacheError when the conductor does not answer; the runner tries again."""
    loading: set[asyncio.Task[None]] = set()
    try:
        while True:
            version = state.fleet.version
            wait_s = _LOST_WAIT_S if state.fleet.forget_lost(state.clock.now_s()) else WAIT_S
            known_s = wait_s if state.fleet.known else 0.0
            listed = await state.conductor.list_instances(version, known_s, state.gateway())
            state.limiter.hear_count(
                listed.gateway_count,
                listed.run,
                state.keyring.running_limit,
                state.clock.now_s(),
            )
            if listed.version != version or not state.fleet.known:
                instances = [engine_instance_of(view) for view in listed.views]
                state.fleet.apply(listed.version, instances, state.clock.now_s(), state.clock.wall_s())
                state.alarms.suspect({one.instance_id for one in instances if one.is_suspect})
                models = [model for model in state.fleet.models.values() if model.instances]
                log.info(
                    Event.INSTANCES_CHANGED,
                    version=listed.version,
                    instances=len(instances),
                    models=len(models),
                )
                for model in models[: _LOADING_MAX - len(loading)]:
                    task = asyncio.create_task(state.tokenizers.prepare(model))
                    loading.add(task)
                    task.add_done_callback(loading.discard)
            await state.clock.sleep(0)  # a conductor that answers at once must not starve the loop
    finally:
        for task in loading:
            task.cancel()
