"""Who looks at the console now, and the events that wait for each of them.

Every look of the collector is encoded once for each topic and shared by all viewers. A viewer has room for a few
events; one that takes them too slowly is dropped, and its page connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from mooncache.errors import LimitExceeded

VIEWERS_MAX: Final = 128
EVENTS_MAX: Final = 4


class Topic(StrEnum):
    """What a page shows live."""

    OVERVIEW = "overview"
    REQUESTS = "requests"
    POOL = "pool"
    INSTANCES = "instances"
    PREFIXES = "prefixes"
    NETWORK = "network"


class Viewer:
    """One open page. `dropped` once it was too slow."""

    def __init__(self, topic: Topic) -> None:
        self.topic, self.dropped = topic, False
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(EVENTS_MAX + 1)  # and the end

    async def next(self) -> bytes | None:
        """The next event; None: there will be none."""
        return None if self.dropped else await self._events.get()

    def offer(self, event: bytes) -> bool:
        """Queue an event; False when too many wait already."""
        if self._events.qsize() >= EVENTS_MAX:
            self.dropped = True
            self.end()
            return False
        self._events.put_nowait(event)
        return True

    def end(self) -> None:
        """No event follows. Harmless to repeat."""
        if not self._events.full():
            self._events.put_nowait(None)


class Viewers:
    """All viewers of one gateway. `wanted` is set while there are some."""

    def __init__(self, viewers_max: int = VIEWERS_MAX) -> None:
        self._viewers_max = viewers_max
        self._viewers: set[Viewer] = set()
        self._last: Mapping[Topic, bytes] = {}
        self._closed = False
        self.wanted = asyncio.Event()

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, topic: Topic) -> Viewer:
        """A new viewer, who gets what was seen last at once. Raises LimitExceeded."""
        if self._closed or len(self._viewers) >= self._viewers_max:
            raise LimitExceeded(
                f"{self._viewers_max} pages of the console are open at this gateway, which is the limit. Close one."
            )
        viewer = Viewer(topic)
        if topic in self._last:
            viewer.offer(self._last[topic])
        self._viewers.add(viewer)
        self.wanted.set()
        return viewer

    def watch(self, topic: Topic) -> bool:
        """Whether a page with this topic is open."""
        return any(viewer.topic is topic for viewer in self._viewers)

    def leave(self, viewer: Viewer) -> None:
        """The page was closed. Harmless to repeat."""
        self._viewers.discard(viewer)
        if not self._viewers:
            self.wanted.clear()

    def publish(self, events: Mapping[Topic, bytes]) -> None:
        """A new look, for all viewers who are there, and who come before the next."""
        self._last = events
        for viewer in list(self._viewers):
            if not viewer.offer(events[viewer.topic]):
                self.leave(viewer)

    def forget(self) -> None:
        """What was seen last is too old to show."""
        self._last = {}

    def close(self) -> None:
        """The gateway ends: so do all streams."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()
        self.wanted.clear()
