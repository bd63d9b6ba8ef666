"""The connection of one plug-in to the pool, and its end."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from mooncache.client.options import ClientOptions
from mooncache.connectors.lmcache.memory import CacheMemory
from mooncache.connectors.lmcache.settings import PluginSettings
from mooncache.connectors.named_blocks import NamedBlocks
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.pool_link import PoolLink, connect_pool
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
CONNECT_WAIT_S: Final = 5.0
"""LMCache's start waits so long for the pool, and goes on without it after that."""


class PoolOfPlugin:
    """A connection that comes by itself, and LMCache's memory, registered with it.

    Raises:
        ConfigInvalid: no cluster is configured, and none is on this machine.
    """

    def __init__(self, settings: PluginSettings, memory: CacheMemory, name: str) -> None:
        state_dir = str(settings.state_dir)
        ClientOptions.gather(
            settings.master_targets or None, state_dir=state_dir
        )  # says early what is missing
        self._in_place = RegisteredMemory(memory, settings.connector.registered_bytes_max)
        build = f"lmcache {importlib.metadata.version('lmcache')}"
        connect = connect_pool(
            master_targets=settings.master_targets, state_dir=state_dir, name=name, build=build
        )
        self.link = PoolLink(connect, prepare=self._in_place)
        self.blocks = NamedBlocks(self.link, settings.connector)
        if settings.connector.enabled and not self.link.connected.wait(CONNECT_WAIT_S):
            _log.warning(
                Event.CONNECTOR_POOL_ABSENT, code="NOT_YET", reason="LMCache starts without the pool"
            )

    def close(self) -> None:
        """End the connection. Calls must have ended."""
        self.link.close()
        self._in_place.close()
