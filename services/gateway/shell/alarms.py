"""Alarms that an instance has become suspect, for the requests that wait for its first token.

A suspicion counts once it has lasted for `GRACE_S`: a conductor that was stopped for a moment suspects all of them
until the next reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

GRACE_S: Final = 0.25

Alarm = asyncio.Future[None]


class Alarms:
    """Use within one event loop."""

    def __init__(self) -> None:
        self._suspects: dict[str, asyncio.TimerHandle] = {}
        self._sick: set[str] = set()
        self._listeners: dict[str, set[Alarm]] = {}

    def is_sick(self, instance_id: str) -> bool:
        """Whether the instance has been suspect for a while."""
        return instance_id in self._sick

    def suspect(self, instance_ids: Collection[str]) -> None:
        """Take the instances that are suspect now; those named before and no longer named are well again."""
        for name in self._suspects.keys() - set(instance_ids):
            self._suspects.pop(name).cancel()
            self._sick.discard(name)
        loop = asyncio.get_running_loop()
        for name in instance_ids:
            if name not in self._suspects:
                self._suspects[name] = loop.call_later(GRACE_S, self._ring, name)

    def listen(self, instance_ids: Collection[str]) -> Alarm:
        """A future that is done once one of the instances is sick. It has to be given to `leave` afterwards."""
        alarm: Alarm = asyncio.get_running_loop().create_future()
        if not self._sick.isdisjoint(instance_ids):
            alarm.set_result(None)
        for name in instance_ids:
            self._listeners.setdefault(name, set()).add(alarm)
        return alarm

    def leave(self, alarm: Alarm, instance_ids: Collection[str]) -> None:
        """No request waits for it now; `instance_ids` as they were given to `listen`."""
        alarm.cancel()
        for name in instance_ids:
            listeners = self._listeners[name]
            listeners.discard(alarm)
            if not listeners:
                del self._listeners[name]

    def _ring(self, name: str) -> None:
        self._sick.add(name)
        for alarm in self._listeners.get(name, ()):
            if not alarm.done():
                alarm.set_result(None)
