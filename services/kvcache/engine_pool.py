"""The pool as an engine in one process uses it: a link, lookups and a mover that wake the same thread, and one watcher
for all that they wait for.

Idea: the engine's thread never waits for the pool. It asks (`lookups.ask`), orders (`mover.load`, `mover.save`) and
goes on; when `changed` is set it takes answers and reports. An engine whose scheduler and workers are processes of
their own makes the same parts one by one, as vLLM's connector does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mooncache.config.serving import ConnectorSection
from mooncache.kvcache.distance import Comparison
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.lookup import Lookups
from mooncache.kvcache.memory import BlockMemory
from mooncache.kvcache.mover import Mover
from mooncache.kvcache.pool_link import OnFailure, PoolClient, PoolLink
from mooncache.kvcache.verifier import ShadowReport, Verifier
from mooncache.kvcache.watcher import Watcher

Shadow = tuple[Comparison, Callable[[ShadowReport], None]]
"""How verified blocks are compared, and who takes what was found."""
SAVE_SHARE = 4
"""Saves may hold one block of so many, or a slow pool would take the engine's memory."""


class EnginePool:
    """The pool as an engine uses it: link, lookups and mover. It starts to connect at once.

    Args:
        section: limits and switches.
        connect: makes a client or raises; called until it succeeds.
        memory: the engine's blocks.
        changed: set when there is an answer or a report to take.
        on_failure: see `PoolLink`.
        shadow: how blocks are compared, and who takes what was found, on another thread; None: they are not.
    """

    def __init__(
        self,
        section: ConnectorSection,
        connect: Callable[[], PoolClient],
        memory: BlockMemory,
        *,
        changed: threading.Event | None = None,
        on_failure: OnFailure | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self.changed = changed or threading.Event()
        self.saved_blocks_max = min(
            section.save_queue_bytes_max // memory.block_bytes, memory.block_count // SAVE_SHARE
        )
        self._in_place = RegisteredMemory(memory, section.registered_bytes_max)
        self.link = PoolLink(connect, on_failure=on_failure, prepare=self._in_place)
        self._watcher = Watcher(self.link)
        self.lookups = Lookups(self.link, changed=self.changed, watcher=self._watcher)
        self.mover = Mover(
            self.link,
            memory,
            load_threads=section.load_threads,
            load_timeout_s=section.load_timeout_s,
            save_timeout_s=section.save_timeout_s,
            save_queue_bytes_max=section.save_queue_bytes_max,
            changed=self.changed,
            watcher=self._watcher,
        )
        self.verifier: Verifier | None = None
        if shadow is not None:
            self.verifier = Verifier(
                self.link,
                memory,
                shadow[0],
                saved=self.mover.report_save,
                heard=shadow[1],
                timeout_s=section.save_timeout_s,
            )

    def close(self) -> None:
        """End the connection and the threads. The memory must live until then."""
        self.link.close()
        self.lookups.close()
        self.mover.close()
        if self.verifier is not None:
            self.verifier.close()
        self._watcher.close()
        self._in_place.close()
